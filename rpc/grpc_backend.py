"""The backend GRADWIRE: starts a gRPC agent and joins its group.

The workers of a static group form it at a barrier. Who joins later appends itself to the log of the group, and
makes itself known to the members: any worker in a dynamic group, one that was started again in a static group.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..c10d.rendezvous.start_barrier import GroupKind, Registration, StartBarrier
from ..c10d.stores.views import PrefixStore
from ..c10d.torch_types import TorchStore
from ..errors import LossCause, RendezvousError, WorkerLostError
from ..net.waiting import wait_with_warnings
from .agent.grpc_agent import GrpcAgent
from .backend_registry import register_backend
from .contracts.messages import MessageType, Request
from .contracts.options import RpcBackendOptions
from .contracts.worker import PROCESS_ENDED, Member, WorkerInfo
from .execution.futures import Future
from .membership.addresses import (
    ListenAddress,
    Presence,
    choose_address,
    find_directory,
    identity,
    presence_of,
    unreachable_members,
)
from .membership.evictions import tell_of_change
from .membership.members import (
    Vacancy,
    check_device_maps,
    device_maps_as_text,
    exchange_members,
    formed_group,
    introduce,
)
from .membership.roster import RosterLog

__all__ = ["AgentFactory", "greet", "start_agent"]

MAX_READY_WAIT_S = 10.0
"""Seconds for which a worker that can be called waits, before it returns, until all others can be called."""

GREETING_TIMEOUT_S = 10.0
"""Seconds that a worker that joins waits for the members to admit it. It goes on without those that do not."""

AgentFactory = Callable[..., GrpcAgent]
"""Makes an agent; takes the arguments of GrpcAgent."""

log = logging.getLogger(__name__)


def start_agent(
    store: TorchStore,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    make_agent: AgentFactory | None = None,
) -> GrpcAgent:
    """Starts an agent and joins the group that rendezvous at a store: see `register_backend`. Returns the agent.

    `make_agent` makes the agent; by default it is a GrpcAgent with the default extensions.

    Raises:
        RendezvousError: workers contradict each other, or did not arrive in time.
        DeviceMapError: a worker's device maps name unknown workers or devices. All workers of a static group
            raise it.
    """
    if make_agent is None:
        from ..extensions import DEFAULT_EXTENSIONS  # here, because the extensions are built on this package

        make_agent = partial(GrpcAgent, extensions=DEFAULT_EXTENSIONS)
    if world_size is None:
        return _join_dynamic(store, name, rank, rpc_backend_options, make_agent)
    return _join_static(
        store, Registration(name=name, rank=rank, world_size=world_size), rpc_backend_options, make_agent
    )


def _join_static(
    store: TorchStore, registration: Registration, options: RpcBackendOptions, make_agent: AgentFactory
) -> GrpcAgent:
    """Starts an agent; returns it once all workers have joined and published their addresses."""
    deadline = time.monotonic() + options.init_timeout
    barrier = StartBarrier(store, registration, GroupKind("rpc", options.CONSENT))
    if (predecessor := barrier.predecessor()) is not None and (formed := formed_group(barrier)) is not None:
        rejoined = _rejoin(store, barrier, predecessor, formed, options, make_agent, deadline)
        if rejoined is not None:
            return rejoined
    barrier.register()
    with _report_failure(barrier):
        directory = find_directory(options)
    group, places = introduce(barrier, identity(directory), options.init_timeout)
    roster = RosterLog(store, group)
    agent = make_agent(WorkerInfo(registration.name, registration.rank), options, group, roster=roster)
    with _shut_down_on_error(agent):
        with _report_failure(barrier):
            me = _listen(agent, choose_address(options, store, directory, places))
        left = max(0.0, deadline - time.monotonic())
        members = exchange_members(barrier, me, partial(unreachable_members, consent=options.CONSENT), left)
        check_device_maps(members, members)
        roster.begin(members)
        agent.open(members, _group_store(store, group, options))
        barrier.go_on_together(min(MAX_READY_WAIT_S, max(0.0, deadline - time.monotonic())))
    return agent


def _rejoin(
    store: TorchStore,
    barrier: StartBarrier,
    predecessor: Registration,
    formed: tuple[str, list[Member]],
    options: RpcBackendOptions,
    make_agent: AgentFactory,
    deadline: float,
) -> GrpcAgent | None:
    """Joins a static group that has `formed`, in the place of a process that had the same name and rank.

    Returns:
        The agent; None if the predecessor lives or has another name, or if the group has ended. If it has ended,
        the rank is free in the next one.

    Raises:
        RendezvousError: the predecessor does not answer and has not been evicted in time, or a member refuses this
            worker.
    """
    group, first = formed
    me = barrier.registration
    if first[me.rank].info.name != me.name:
        return None
    roster = RosterLog(store, group)
    roster.begin(first)
    places = [(member.network, member.directory) for member in first]
    where = choose_address(options, store, find_directory(options), places)
    vacancy = Vacancy(roster, where, options, me.name, lambda: group)
    while True:
        former = vacancy.wait(max(0.0, deadline - time.monotonic()))
        if former is not None and presence_of(former, where) is not Presence.GONE:
            return None
        others = [member for member in roster.members() if member.info.id != me.rank]
        if all(presence_of(member, where) is Presence.GONE for member in others):
            barrier.succeed(predecessor)
            return None
        agent = make_agent(roster.choose(me.name, me.rank), options, group, roster=roster)
        if _has_joined(agent, roster, where, me.rank, deadline, _group_store(store, group, options)):
            barrier.succeed(predecessor)
            log.info("worker %s has taken its place in the group again", me)
            return agent
        if time.monotonic() > deadline:
            raise RendezvousError(f"no member of the group has admitted {me}, which takes the place of {former}")


def _join_dynamic(
    store: TorchStore, name: str, rank: int, options: RpcBackendOptions, make_agent: AgentFactory
) -> GrpcAgent:
    """Starts an agent; returns it once the current members know it.

    The agent is made for the name and id that are free in the known log. If another worker joins meanwhile and
    takes them, another agent is made.
    """
    deadline = time.monotonic() + options.init_timeout
    where = choose_address(options, store, find_directory(options), None)
    group = store.compare_set("rpc/dynamic/group", "", uuid.uuid4().hex).decode()
    roster = RosterLog(store)

    def group_name() -> str:
        return f"dynamic/{group}/{roster.epoch}"

    vacancy = Vacancy(roster, where, options, name, group_name)
    while True:
        namesake = vacancy.wait(max(0.0, deadline - time.monotonic()))
        if namesake is not None and presence_of(namesake, where) is Presence.GONE:  # as before a restart
            roster.leave(namesake.info.wire_id, PROCESS_ENDED.reason)
            where.clean_up(namesake.address)
        agent = make_agent(roster.choose(name, rank), options, group_name(), roster=roster)
        if _has_joined(agent, roster, where, rank, deadline):
            return agent


def _listen(agent: GrpcAgent, where: ListenAddress) -> Member:
    """Has an agent listen, and returns what the others need to know about it."""
    return Member(
        agent.info,
        agent.listen(where),
        process=Registration(rank=agent.info.id, world_size=-1).description,
        device_maps=device_maps_as_text(agent.options.device_maps),
        directory=identity(where.directory),
    )


def _has_joined(
    agent: GrpcAgent,
    roster: RosterLog,
    where: ListenAddress,
    rank: int,
    deadline: float,
    store: PrefixStore | None = None,
) -> bool:
    """Has an agent join by the log; returns whether it has. If not, it is shut down.

    It has not if it cannot have its ids (see `_append_join`), or no member of a static group has admitted it.

    Raises:
        RendezvousError: this worker and the current members cannot reach each other, its name, or the rank that it
            was given, has been taken, or a member refuses it.
        DeviceMapError: its device maps name devices that a member lacks.
    """
    with _shut_down_on_error(agent):
        me = _listen(agent, where)
        members = [*roster.members(), me]
        if problem := unreachable_members(members, agent.options.CONSENT):
            raise RendezvousError(problem)
        check_device_maps([me], members, dynamic=True)
        if _append_join(roster, me, rank):
            agent.open(roster.members(), store)
            if greet(agent, roster, where, deadline) or roster.dynamic:
                return True
    agent.shutdown(graceful=False, timeout=0)
    return False


def _append_join(roster: RosterLog, me: Member, rank: int) -> bool:
    """Appends this worker's join to the log, again after joins of others that do not conflict with it.

    Returns False, without a join, if its ids have been taken or the group has begun a new epoch.
    """
    epoch = roster.epoch
    while not roster.join(me):
        if roster.epoch != epoch or roster.choose(me.info.name, rank) != me.info:
            return False
    return True


def greet(agent: GrpcAgent, roster: RosterLog, where: ListenAddress, deadline: float) -> int:
    """Makes this worker, which is in the log and listens at `where`, known to the current members.

    Those whose processes have ended are removed from a dynamic group, and the others are told. Those that do not
    answer stay members, since they may be unreachable from here only; they learn of this worker from the others.

    Returns:
        The number of members that have admitted this worker before the deadline, on the monotonic clock.

    Raises:
        RendezvousError: a member refuses this worker.
    """
    seconds = max(1e-3, min(GREETING_TIMEOUT_S, deadline - time.monotonic()))
    ends = time.monotonic() + seconds
    greetings = [
        (member, agent.request(member.info, Request(MessageType.GREETING, None, timeout=seconds)))
        for member in roster.members()
        if member.info != agent.info
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
                roster.catch_up()
                if roster.has(worker.wire_id):  # it lives, so it stays
                    raise RendezvousError(
                        f"member {worker.name!r} refuses {agent.info.name!r}, which wants to join: {error.reason}"
                    ) from error
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


def _go_on_without(agent: GrpcAgent, worker: WorkerInfo, error: Exception) -> None:
    log.warning("worker %s joins although %s has not admitted it: %s", agent.info.name, worker.name, error)


def _wait_for_answer(greeting: Future[Any], seconds: float, doing: str) -> None:
    """Waits until a greeting has been answered or has failed. Raises RuntimeError if neither happens."""
    answered = threading.Event()
    greeting.add_done_callback(lambda _: answered.set())
    if not wait_with_warnings(answered.wait, max(1.0, seconds), lambda: doing):
        raise RuntimeError("it does not answer")


def _group_store(store: TorchStore, group: str, options: RpcBackendOptions) -> PrefixStore:
    """Returns the part of a store that belongs to a group."""
    part = PrefixStore(f"rpc/{group}", store)
    part.credentials = options.find_credentials()  # for the process groups of the workers
    return part


@contextmanager
def _shut_down_on_error(agent: GrpcAgent) -> Iterator[None]:
    """Context manager that shuts an agent down which cannot join."""
    try:
        yield
    except BaseException:
        agent.shutdown(graceful=False, timeout=0)
        raise


@contextmanager
def _report_failure(barrier: StartBarrier) -> Iterator[None]:
    """Tells the other members of an error with which this one cannot start."""
    try:
        yield
    except Exception as error:
        barrier.report_failure(f"{barrier.registration} cannot start: {error}")
        raise


def _options(rpc_timeout: float, init_method: str, **others: Any) -> RpcBackendOptions:
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


GRADWIRE = register_backend("GRADWIRE", _options, start_agent)
