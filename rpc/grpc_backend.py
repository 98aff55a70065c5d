"""The backend GRADWIRE: starts a gRPC agent and joins its group."""

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..c10d.host_identity import is_local, network_id
from ..c10d.registration import GroupKind, Registration
from ..c10d.start_barrier import StartBarrier
from ..c10d.stores.prefix import PrefixStore
from ..c10d.torch_types import TorchStore
from ..c10d.user_sockets import UNIX_SCHEME, SocketDirectory, is_listening
from ..c10d.waiting import wait_with_warnings
from ..errors import LossCause, RendezvousError, WorkerLostError
from .agent.grpc_agent import GrpcAgent
from .backend_registry import register_backend
from .contracts.messages import MessageType, Request
from .contracts.options import RpcBackendOptions
from .contracts.worker import WorkerInfo
from .execution.futures import Future
from .membership.addresses import ListenAddress, choose_address, find_directory, unreachable_members
from .membership.device_maps import check_device_maps, device_maps_as_text
from .membership.members import Member, exchange_members, introduce
from .membership.roster_log import RosterLog

__all__ = ["AgentFactory", "start_agent"]

AgentFactory = Callable[..., GrpcAgent]
"""Makes an agent; takes the arguments of GrpcAgent."""

PROBE_TIMEOUT_S = 5.0
"""Seconds that a member may take to accept a connection, when a worker that wants its name checks that it
lives."""


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
    barrier.register()
    with _report_failure(barrier):
        directory = find_directory(options)
    group, places = introduce(barrier, _identity(directory), options.init_timeout)
    agent = make_agent(WorkerInfo(registration.name, registration.rank), options, group)
    with _shut_down_on_error(agent):
        with _report_failure(barrier):
            where = choose_address(options, store, directory, places)
            address = agent.listen(where)
        me = Member(
            agent.info,
            address,
            network=places[registration.rank][0],
            process=registration.description,
            device_maps=device_maps_as_text(options.device_maps),
            directory=_identity(where.directory),
        )
        left = max(0.0, deadline - time.monotonic())
        members = exchange_members(barrier, me, partial(unreachable_members, consent=options.CONSENT), left)
        check_device_maps(members, members)
        group_store = PrefixStore(f"rpc/{group}", store)
        group_store.credentials = options.find_credentials()  # for the process groups of the workers
        agent.open(members, group_store)
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
    while True:
        log.catch_up()
        _remove_dead_namesake(log, name, where)
        epoch = log.epoch
        agent = make_agent(log.choose(name, rank), options, f"dynamic/{group}/{epoch}", roster=log)
        with _shut_down_on_error(agent):
            me = _listen_as_member(agent, log, where, options)
            if _append_join(log, me, rank, epoch):
                agent.open(log.members())
                _greet(agent, log, deadline, options.init_timeout)
                return agent
        agent.shutdown(graceful=False, timeout=0)


@contextmanager
def _shut_down_on_error(agent: GrpcAgent) -> Iterator[None]:
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


def _identity(directory: SocketDirectory | None) -> str:
    return directory.identity if directory is not None else ""


def _remove_dead_namesake(log: RosterLog, name: str, where: ListenAddress) -> None:
    """Removes the member of this name from the group if it is dead, such as this worker before a restart."""
    namesake = log.find(name)
    if namesake is not None and _is_dead(namesake, where):
        log.leave(namesake.info.wire_id)


def _listen_as_member(
    agent: GrpcAgent, log: RosterLog, where: ListenAddress, options: RpcBackendOptions
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
        directory=_identity(where.directory),
    )
    members = [*log.members(), me]
    if problem := unreachable_members(members, options.CONSENT):
        raise RendezvousError(problem)
    check_device_maps([me], members, dynamic=True)
    return me


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


def _is_dead(member: Member, where: ListenAddress) -> bool:
    """Returns whether a member is known to be dead, because nothing listens at its address any more."""
    is_here = member.network == network_id() and member.directory == _identity(where.directory)
    if not is_here and (member.has_unix_socket or is_local(member.host)):
        return False  # elsewhere, where its address means something else
    try:
        target = where.reach(member.address)
        if member.has_unix_socket:
            return not is_listening(target.removeprefix(UNIX_SCHEME))
        port = member.address.rpartition(":")[2]
        socket.create_connection((member.host, int(port)), PROBE_TIMEOUT_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False  # it may live, and just be unreachable from here
    return False


def _greet(agent: GrpcAgent, log: RosterLog, deadline: float, timeout: float) -> None:
    """Makes this worker known to the current members, and removes those that are dead from the group.

    Args:
        agent: the agent of this worker, which is in the log.
        log: the members.
        deadline: when to stop waiting, on the monotonic clock.
        timeout: the seconds that were allowed in all, for errors.

    Raises:
        RendezvousError: a member did not answer in time, or refuses this worker.
    """
    others: Sequence[WorkerInfo] = [worker for worker in agent.workers() if worker != agent.info]
    left = max(1e-3, deadline - time.monotonic())
    greetings = [
        (worker, agent.request(worker, Request(MessageType.GREETING, None, timeout=left))) for worker in others
    ]
    for worker, greeting in greetings:
        try:
            _wait_for_answer(greeting, left, f"{agent.info.name!r} waits for member {worker.name!r} to admit it")
            greeting.wait()
        except WorkerLostError as error:
            if error.cause is LossCause.REFUSED:
                _check_has_left(agent, log, worker, error.reason)
            else:
                log.leave(worker.wire_id)
        except RuntimeError as error:
            raise RendezvousError(
                f"member {worker.name!r} did not answer within {timeout:g} s to {agent.info.name!r}, which wants "
                f"to join: {error}"
            ) from error


def _wait_for_answer(greeting: Future[Any], seconds: float, doing: str) -> None:
    """Waits until a greeting has been answered or has failed, and logs long waits."""
    answered = threading.Event()
    greeting.add_done_callback(lambda _: answered.set())
    wait_with_warnings(answered.wait, seconds, lambda: doing)


def _check_has_left(agent: GrpcAgent, log: RosterLog, worker: WorkerInfo, reason: str) -> None:
    """Raises RendezvousError if a worker that has refused this one is still a member: it lives, so it stays."""
    log.catch_up()
    if worker.wire_id in {member.info.wire_id for member in log.members()}:
        raise RendezvousError(f"member {worker.name!r} refuses {agent.info.name!r}, which wants to join: {reason}")


def _options(rpc_timeout: float, init_method: str, **others: Any) -> RpcBackendOptions:
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


GRADWIRE = register_backend("GRADWIRE", _options, start_agent)
