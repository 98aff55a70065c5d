"""Starting gRPC agents: the backend GRADWIRE."""

import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..c10d.host_identity import is_local, network_id
from ..c10d.registration import GroupKind, Registration
from ..c10d.start_barrier import StartBarrier
from ..c10d.stores.prefix import PrefixStore
from ..c10d.torch_types import TorchStore
from ..c10d.waiting import wait_with_warnings
from ..errors import LossCause, RendezvousError, WorkerLostError
from .agent.grpc_agent import GrpcAgent
from .backend_registry import register_backend
from .contracts.messages import MessageType, Request
from .contracts.options import RpcBackendOptions
from .contracts.worker import WorkerInfo
from .execution.futures import Future
from .membership.addresses import choose_address, unreachable_members
from .membership.device_maps import check_device_maps, device_maps_as_text
from .membership.members import Member, exchange_members, introduce
from .membership.roster import RosterLog

__all__ = ["AgentFactory", "start_agent"]

AgentFactory = Callable[..., GrpcAgent]
"""Called as GrpcAgent is."""

PROBE_SECONDS = 5.0
"""How long a member may take to accept the connection of who wants its name."""


def start_agent(
    store: TorchStore,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    make_agent: AgentFactory | None = None,
) -> GrpcAgent:
    """An agent that has joined the group which meets at a store.

    Args:
        store: of the group.
        name: this worker's.
        rank: this worker's; -1 for any in a dynamic group.
        world_size: None for a dynamic group.
        rpc_backend_options: its options.
        make_agent: makes the agent; by default a GrpcAgent with the default extensions.

    Raises:
        RendezvousError: the workers contradict each other, or do not come.
        DeviceMapError: a worker has a device map with unknown workers or devices. All workers raise it.
    """
    if make_agent is None:
        from ..extensions import DEFAULT_EXTENSIONS  # here, because the extensions are built on this package

        make_agent = partial(GrpcAgent, extensions=DEFAULT_EXTENSIONS)
    if world_size is None:
        return _join_dynamic(store, name, rank, rpc_backend_options, make_agent)
    options = rpc_backend_options
    deadline = time.monotonic() + options.init_timeout
    registration = Registration(name=name, rank=rank, world_size=world_size)
    barrier = StartBarrier(store, registration, GroupKind("rpc", options.CONSENT))
    barrier.register()
    group, networks = introduce(barrier, options.init_timeout)
    agent = make_agent(WorkerInfo(name, rank), options, group)
    try:
        try:
            address = agent.listen(choose_address(options, store, networks))
        except Exception as error:
            barrier.report_failure(f"{registration} cannot start: {error}")
            raise
        me = Member(
            agent.info,
            address,
            network=networks[rank],
            process=registration.description,
            device_maps=device_maps_as_text(options.device_maps),
        )
        left = max(0.0, deadline - time.monotonic())
        members = exchange_members(barrier, me, partial(unreachable_members, consent=options.CONSENT), left)
        check_device_maps(members, members)
        agent.open(members, PrefixStore(f"rpc/{group}", store))
    except BaseException:
        agent.shutdown(graceful=False, timeout=0)
        raise
    return agent


def _join_dynamic(
    store: TorchStore, name: str, rank: int, options: RpcBackendOptions, make_agent: AgentFactory
) -> GrpcAgent:
    deadline = time.monotonic() + options.init_timeout
    group = store.compare_set("rpc/dynamic/group", "", uuid.uuid4().hex).decode()
    log = RosterLog(store)
    while True:
        log.catch_up()
        if (before := log.named(name)) is not None and _is_dead(before):
            log.leave(before.info.id)
        epoch = log.epoch
        agent = make_agent(log.choose(name, rank), options, f"dynamic/{group}/{epoch}", roster=log)
        try:
            address = agent.listen(choose_address(options, store, None))
            me = Member(
                agent.info,
                address,
                process=Registration(rank=rank, world_size=-1).description,
                device_maps=device_maps_as_text(options.device_maps),
            )
            everybody = [*log.members(), me]
            if problem := unreachable_members(everybody, options.CONSENT):
                raise RendezvousError(problem)
            check_device_maps([me], everybody, dynamic=True)
            # Somebody may be faster; another try is needed only if that contradicts what was chosen.
            while not (joined := log.join(me)):
                if log.epoch != epoch or log.choose(name, rank) != agent.info:
                    break
            if joined:
                agent.open(log.members())
                _greet(agent, log, deadline, options.init_timeout)
                return agent
        except BaseException:
            agent.shutdown(graceful=False, timeout=0)
            raise
        agent.shutdown(graceful=False, timeout=0)


def _is_dead(member: Member) -> bool:
    """Does nobody listen any more where this member did? A worker started again finds its own old self."""
    if is_local(member.host) and member.network != network_id():
        return False  # it is on another host, where that address means something else
    port = member.address.rpartition(":")[2]
    try:
        socket.create_connection((member.host, int(port)), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # it may live and be cut off from here
    return False


def _greet(agent: GrpcAgent, log: RosterLog, deadline: float, timeout: float) -> None:
    """Has the members of the moment know this worker; those that do not live any more leave the group."""
    others: Sequence[WorkerInfo] = [worker for worker in agent.workers() if worker != agent.info]
    left = max(1e-3, deadline - time.monotonic())
    greetings = [
        (worker, agent.request(worker, Request(MessageType.GREETING, None, timeout=left))) for worker in others
    ]
    for worker, greeting in greetings:
        try:
            _wait_for_answer(greeting, left, f"{agent.info.name!r} waits for member {worker.name!r} to let it in")
            greeting.wait()
        except WorkerLostError as error:
            if error.cause is LossCause.REFUSED:
                _check_left(agent, log, worker, error.reason)
            else:
                log.leave(worker.id)
        except RuntimeError as error:
            raise RendezvousError(
                f"member {worker.name!r} did not answer within {timeout:g} s to {agent.info.name!r}, which wants "
                f"to join: {error}"
            ) from error


def _wait_for_answer(greeting: Future[Any], seconds: float, doing: str) -> None:
    """Waits for a greeting to end; it has a timeout of its own."""
    answered = threading.Event()
    greeting.add_done_callback(lambda _: answered.set())
    wait_with_warnings(answered.wait, seconds, lambda: doing)


def _check_left(agent: GrpcAgent, log: RosterLog, worker: WorkerInfo, reason: str) -> None:
    """Raises RendezvousError if a worker that has refused this one is a member still: it lives, so it stays."""
    log.catch_up()
    if worker.id in {member.info.id for member in log.members()}:
        raise RendezvousError(f"member {worker.name!r} refuses {agent.info.name!r}, which wants to join: {reason}")


def _options(rpc_timeout: float, init_method: str, **others: Any) -> RpcBackendOptions:
    return RpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **others)


GRADWIRE = register_backend("GRADWIRE", _options, start_agent)
