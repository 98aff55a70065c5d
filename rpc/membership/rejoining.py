"""How a worker that is started again takes its place in a static group that has formed."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ...c10d.rendezvous.registration import Registration
from ...c10d.rendezvous.start_barrier import StartBarrier
from ...c10d.torch_types import TorchStore
from ...errors import RendezvousError
from ..contracts.member import Member
from ..contracts.options import RpcBackendOptions
from .addresses import choose_address, find_directory
from .joining import JoiningAgent, greet, group_store, listen_as_member, shut_down_on_error
from .presence import Presence, presence_of
from .roster_log import RosterLog
from .vacancy import Vacancy

__all__ = ["rejoin"]

log = logging.getLogger(__name__)

A = TypeVar("A", bound=JoiningAgent)


def rejoin(
    store: TorchStore,
    barrier: StartBarrier,
    predecessor: Registration,
    formed: tuple[str, list[Member]],
    options: RpcBackendOptions,
    make_agent: Callable[..., A],
    deadline: float,
) -> A | None:
    """Joins a group in the place of a process that had the same name and rank.

    Args:
        store: the store of the group.
        barrier: at which it formed.
        predecessor: the process that has registered the rank of this worker.
        formed: the name of the group, and the members that formed it.
        options: those of this worker.
        make_agent: makes the agent; takes the arguments of GrpcAgent.
        deadline: when to stop waiting, on the monotonic clock.

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
        with shut_down_on_error(agent):
            member = listen_as_member(agent, roster, where, options)
            if roster.join(member):
                agent.open(roster.members(), group_store(store, group, options))
                if greet(agent, roster, where, deadline):
                    barrier.succeed(predecessor)
                    log.info("worker %s has taken its place in the group again", me)
                    return agent
        agent.shutdown(graceful=False, timeout=0)
        if time.monotonic() > deadline:
            raise RendezvousError(f"no member of the group has admitted {me}, which takes the place of {former}")
