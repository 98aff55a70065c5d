"""What a worker does that joins a group: it listens, and makes itself known to the members."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ...c10d.rendezvous.registration import Registration
from ...c10d.stores.prefix import PrefixStore
from ...c10d.torch_types import TorchStore
from ...errors import LossCause, RendezvousError, WorkerLostError
from ...net.user_sockets import SocketDirectory
from ...net.waiting import wait_with_warnings
from ..contracts.control import ControlMessages
from ..contracts.member import Member
from ..contracts.messages import MessageType, Request
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import PROCESS_ENDED
from ..execution.futures import Future
from .addresses import ListenAddress, unreachable_members
from .device_maps import check_device_maps, device_maps_as_text
from .evictions import tell_of_change
from .presence import Presence, presence_of
from .roster_log import RosterLog

__all__ = ["JoiningAgent", "greet", "group_store", "identity", "listen_as_member", "shut_down_on_error"]

GREETING_TIMEOUT_S = 10.0
"""Seconds that a worker that joins waits for the members to admit it. It goes on without those that do not."""

log = logging.getLogger(__name__)


class JoiningAgent(Protocol):
    """The agent of a worker that joins a group: see GrpcAgent."""

    info: WorkerInfo
    control: ControlMessages

    def listen(self, where: ListenAddress | None = None) -> str:
        """Starts serving."""

    def open(self, members: Sequence[Member], store: PrefixStore | None = None) -> None:
        """Lets the members of the group in."""

    def request(self, worker: WorkerInfo, request: Request) -> Future[Any]:
        """Sends a request and returns a future of its answer."""

    def shutdown(self, *, graceful: bool, timeout: float, join: Callable[[], None] | None = None) -> None:
        """Leaves the group."""


@contextmanager
def shut_down_on_error(agent: JoiningAgent) -> Iterator[None]:
    """Context manager that shuts an agent down which cannot join."""
    try:
        yield
    except BaseException:
        agent.shutdown(graceful=False, timeout=0)
        raise


def group_store(store: TorchStore, group: str, options: RpcBackendOptions) -> PrefixStore:
    """Returns the part of a store that belongs to a group."""
    part = PrefixStore(f"rpc/{group}", store)
    part.credentials = options.find_credentials()  # for the process groups of the workers
    return part


def identity(directory: SocketDirectory | None) -> str:
    """Returns what identifies a directory of sockets; empty without one."""
    return directory.identity if directory is not None else ""


def listen_as_member(
    agent: JoiningAgent, log: RosterLog, where: ListenAddress, options: RpcBackendOptions
) -> Member:
    """Has the agent listen, and checks it against the current members. Returns the member.

    Raises:
        RendezvousError: this worker and the current members cannot reach each other.
        DeviceMapError: its device maps name devices that a member lacks.
    """
    me = Member(
        agent.info,
        agent.listen(where),
        process=Registration(rank=agent.info.id, world_size=-1).description,
        device_maps=device_maps_as_text(options.device_maps),
        directory=identity(where.directory),
    )
    members = [*log.members(), me]
    if problem := unreachable_members(members, options.CONSENT):
        raise RendezvousError(problem)
    check_device_maps([me], members, dynamic=True)
    return me


def greet(agent: JoiningAgent, roster: RosterLog, where: ListenAddress, deadline: float) -> int:
    """Makes this worker known to the current members.

    Those whose processes have ended are removed from a dynamic group, and the others are told. Those that do not
    answer stay members, since they may be unreachable from here only; they learn of this worker from the others.

    Args:
        agent: the agent of this worker, which is in the log.
        roster: the members.
        where: the address of this worker.
        deadline: when to stop waiting, on the monotonic clock.

    Returns:
        The number of members that have admitted this worker.

    Raises:
        RendezvousError: a member refuses this worker.
    """
    current = {member.info.wire_id: member for member in roster.members() if member.info != agent.info}
    seconds = max(1e-3, min(GREETING_TIMEOUT_S, deadline - time.monotonic()))
    ends = time.monotonic() + seconds
    greetings = [
        (member, agent.request(member.info, Request(MessageType.GREETING, None, timeout=seconds)))
        for member in current.values()
    ]
    admitted: list[WorkerInfo] = []
    has_removed = False
    for member, greeting in greetings:
        worker = member.info
        try:
            _wait_for_answer(
                greeting, ends - time.monotonic(), f"{agent.info.name!r} waits for {worker.name!r} to admit it"
            )
            greeting.wait()
            admitted.append(worker)
        except WorkerLostError as error:
            if error.cause is LossCause.REFUSED:
                _check_has_left(agent, roster, worker, error.reason)
            elif not roster.dynamic:
                continue  # it stays a member, which may be started again
            elif presence_of(member, where) is Presence.GONE:
                roster.leave(worker.wire_id, PROCESS_ENDED.reason)
                where.clean_up(member.address)
                has_removed = True
            else:
                _go_on_without(agent, worker, error)
        except RuntimeError as error:
            _go_on_without(agent, worker, error)
    if has_removed:
        tell_of_change(agent.control, admitted)
    return len(admitted)


def _go_on_without(agent: JoiningAgent, worker: WorkerInfo, error: Exception) -> None:
    log.warning("worker %s joins although %s has not admitted it: %s", agent.info.name, worker.name, error)


def _wait_for_answer(greeting: Future[Any], seconds: float, doing: str) -> None:
    """Waits until a greeting has been answered or has failed. Raises RuntimeError if neither happens."""
    answered = threading.Event()
    greeting.add_done_callback(lambda _: answered.set())
    if not wait_with_warnings(answered.wait, max(1.0, seconds), lambda: doing):
        raise RuntimeError("it does not answer")


def _check_has_left(agent: JoiningAgent, roster: RosterLog, worker: WorkerInfo, reason: str) -> None:
    """Raises RendezvousError if a worker that has refused this one is still a member: it lives, so it stays."""
    roster.catch_up()
    if worker.wire_id in {member.info.wire_id for member in roster.members()}:
        raise RendezvousError(f"member {worker.name!r} refuses {agent.info.name!r}, which wants to join: {reason}")
