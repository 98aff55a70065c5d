"""The backend GRADWIRE: starts a gRPC agent and joins its group."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..c10d.rendezvous.registration import GroupKind, Registration
from ..c10d.rendezvous.start_barrier import StartBarrier
from ..c10d.torch_types import TorchStore
from .agent.grpc_agent import GrpcAgent
from .backend_registry import register_backend
from .contracts.member import Member
from .contracts.options import RpcBackendOptions
from .contracts.worker import WorkerInfo
from .contracts.worker_end import PROCESS_ENDED
from .membership.addresses import choose_address, find_directory, unreachable_members
from .membership.device_maps import check_device_maps, device_maps_as_text
from .membership.joining import greet, group_store, identity, listen_as_member, shut_down_on_error
from .membership.members import exchange_members, formed_group, introduce
from .membership.presence import Presence, presence_of
from .membership.rejoining import rejoin
from .membership.roster_log import RosterLog
from .membership.vacancy import Vacancy

__all__ = ["AgentFactory", "start_agent"]

MAX_READY_WAIT_S = 10.0
"""Seconds for which a worker that can be called waits, before it returns, until all others can be called."""

AgentFactory = Callable[..., GrpcAgent]
"""Makes an agent; takes the arguments of GrpcAgent."""


def start_agent(
    store: TorchStore,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    make_agent: AgentFactory | None = None,
) -> GrpcAgent:
    """Starts an agent and joins the group that rendezvous at a store. Returns the agent.

    Args:
        store: the store of the group.
        name: the name of this worker.
        rank: the rank of this worker; -1 for a free one in a dynamic group.
        world_size: the number of workers; None for a dynamic group.
        rpc_backend_options: the options of this worker.
        make_agent: makes the agent; by default a GrpcAgent with the default extensions.

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
        rejoined = rejoin(store, barrier, predecessor, formed, options, make_agent, deadline)
        if rejoined is not None:
            return rejoined
    barrier.register()
    with _report_failure(barrier):
        directory = find_directory(options)
    group, places = introduce(barrier, identity(directory), options.init_timeout)
    log = RosterLog(store, group)
    agent = make_agent(WorkerInfo(registration.name, registration.rank), options, group, roster=log)
    with shut_down_on_error(agent):
        with _report_failure(barrier):
            where = choose_address(options, store, directory, places)
            address = agent.listen(where)
        me = Member(
            agent.info,
            address,
            network=places[registration.rank][0],
            process=registration.description,
            device_maps=device_maps_as_text(options.device_maps),
            directory=identity(where.directory),
        )
        left = max(0.0, deadline - time.monotonic())
        members = exchange_members(barrier, me, partial(unreachable_members, consent=options.CONSENT), left)
        check_device_maps(members, members)
        log.begin(members)
        agent.open(members, group_store(store, group, options))
        barrier.go_on_together(min(MAX_READY_WAIT_S, max(0.0, deadline - time.monotonic())))
    return agent


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
    log = RosterLog(store)
    vacancy = Vacancy(log, where, options, name, lambda: f"dynamic/{group}/{log.epoch}")
    while True:
        namesake = vacancy.wait(max(0.0, deadline - time.monotonic()))
        if namesake is not None and presence_of(namesake, where) is Presence.GONE:  # as before a restart
            log.leave(namesake.info.wire_id, PROCESS_ENDED.reason)
            where.clean_up(namesake.address)
        epoch = log.epoch
        agent = make_agent(log.choose(name, rank), options, f"dynamic/{group}/{epoch}", roster=log)
        with shut_down_on_error(agent):
            me = listen_as_member(agent, log, where, options)
            if _append_join(log, me, rank, epoch):
                agent.open(log.members())
                greet(agent, log, where, deadline)
                return agent
        agent.shutdown(graceful=False, timeout=0)


@contextmanager
def _report_failure(barrier: StartBarrier) -> Iterator[None]:
    """Tells the other members of an error with which this one cannot start."""
    try:
        yield
    except Exception as error:
        barrier.report_failure(f"{barrier.registration} cannot start: {error}")
        raise


def _append_join(log: RosterLog, me: Member, rank: int, epoch: int) -> bool:
    """Appends this worker's join to the log, again after joins of others that do not conflict with it.

    Returns:
        False, without a join, if its id has been taken or the group has begun a new epoch.

    Raises:
        RendezvousError: its name, or the rank that it was given, has been taken.
    """
    while not log.join(me):
        if log.epoch != epoch or log.choose(me.info.name, rank) != me.info:
            return False
    return True


def _options(rpc_timeout: float, init_method: str, **others: Any) -> RpcBackendOptions:
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


GRADWIRE = register_backend("GRADWIRE", _options, start_agent)
