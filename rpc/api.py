"""Joining and leaving a group of workers."""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Any, ParamSpec, TypeVar

from ..c10d.registration import GroupKind
from ..c10d.rendezvous import rendezvous
from ..c10d.torch_types import TorchStore
from ..errors import RpcError
from .backend_registry import BackendType, construct_rpc_backend_options, init_backend
from .contracts.agent import Destination, RpcAgent, current_agent, holder
from .contracts.options import RpcBackendOptions, check_rpc_timeout
from .contracts.worker import WorkerInfo, check_worker_name
from .contracts.worker_end import WorkerEnd, last_uncaught_error
from .contracts.worker_events import WorkerEvent, WorkerEventHandle, WorkerJoined, WorkerLeft
from .membership.addresses import check_consent

__all__ = [
    "debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "on_worker_joined",
    "on_worker_left",
    "require_initialized",
    "set_rpc_timeout",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")

LEAVE_PRIORITY = 110
"""At the end of a process agents leave before process groups and stores are closed, whose numbers are lower."""

_joining = threading.Lock()


def is_available() -> bool:
    """Can this process use RPC? gradwire needs nothing that could be missing."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    store: TorchStore | None = None,
) -> None:
    """Joins the group of workers.

    In a static group, whose size is known, it returns when all workers have joined. In a dynamic one workers
    join and leave at any time, and it returns when the members of the moment know the new one. While it waits, a
    warning in the log says for whom, after 10 seconds and then at intervals that double.

    Workers on several hosts need `rpc_backend_options=rpc.RpcBackendOptions(insecure=True)`, all of them, and a
    MASTER_ADDR or an `init_method` at which all reach rank 0; `host` of the same options is for hosts that have
    several addresses (docs/hosts.md).

    Args:
        name: this worker's, unique in the group.
        backend: a member of BackendType, or its name. By default the one that the options belong to.
        rank: 0 to world_size - 1; by default RANK of the environment (or the rank in the URL). In a dynamic
            group any number that no worker has had; by default a free one.
        world_size: the number of workers; by default WORLD_SIZE of the environment (or that in the URL). If
            nobody says it, the group is dynamic.
        rpc_backend_options: see RpcBackendOptions.
        store: meet through this store instead of the options' `init_method`. Any torch store; it stays open.

    Raises:
        RendezvousError: the workers cannot find each other, or contradict each other; then all raise the same.
        RpcError: this process is a worker already.
        TypeError, ValueError: an argument cannot be.
    """
    kind, options = _choose(backend, rpc_backend_options)
    check_worker_name(name)
    check_consent(options)
    with _joining, ExitStack() as opened:
        if (running := holder.get()) is not None:
            raise RpcError(f"RPC is already initialized: this process is worker {running.info.name!r}")
        met = rendezvous(
            None if store is not None else options.init_method,
            rank=rank,
            world_size=world_size or None,
            store=store,
            timeout=options.init_timeout,
            insecure=options.insecure,
            dynamic=True,
            name=name,
            kind=GroupKind("rpc", options.CONSENT),
        )
        opened.callback(met.close)
        try:
            agent = init_backend(
                kind,
                store=met.store,
                name=name,
                rank=met.rank,
                world_size=met.world_size,
                rpc_backend_options=options,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # without the frames of the wait
        # gRPC must not be torn down while it runs: a program that ends without shutdown leaves at once. Unlike
        # atexit, Finalize also runs in the children of multiprocessing, and not in those forked from this process.
        leave = Finalize(None, _leave_at_exit, (agent, last_uncaught_error()), exitpriority=LEAVE_PRIORITY)
        opened.callback(leave.cancel)
        holder.set_default(agent, opened.pop_all())


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the group.

    Args:
        graceful: In a static group, wait until all workers have called shutdown and no call is under way
            anywhere; then nothing is lost. A worker that dies meanwhile is not waited for. In a dynamic
            group, wait until this worker has no calls under way. Otherwise leave at once.
        timeout: seconds to wait, 0 for none. This worker leaves also when it is over.

    Raises:
        NotInitializedError: this process is no worker.
        RpcTimeoutError: the others did not come in time; it says who.
    """
    agent = current_agent()
    try:
        agent.shutdown(graceful=graceful, timeout=timeout)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the frames of the wait
    finally:
        holder.forget(agent)


def get_worker_info(worker_name: Destination | None = None) -> WorkerInfo:
    """A worker's name and id; without an argument, this worker's.

    Raises:
        NotInitializedError, UnknownWorkerError
    """
    agent = current_agent()
    return agent.info if worker_name is None else agent.worker(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Returns the workers of the group by id, this one among them.

    Those of a static group are all that were in it from the beginning, lost or not; those of a dynamic group are
    the current members.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return list(current_agent().workers())


def on_worker_joined(callback: Callable[[WorkerInfo], object]) -> WorkerEventHandle:
    """Has a function called with each worker that joins the group from now on.

    `workers` of the returned handle are those that are present at this moment: a worker is either among them or
    the callback is called for it, exactly once. Nobody joins a static group once `init_rpc` has returned.

    All callbacks of this worker, of this function and `on_worker_left`, run one after another in the order of the
    events, on a thread that runs incoming calls: they may make calls, and one that blocks holds up the others.
    What a callback raises is logged. None begins after `shutdown`.

    Args:
        callback: called with the worker, which can be called by then.

    Returns:
        A handle; `handle.remove()` removes the callback, as the end of a `with` block of the handle does.

    Raises:
        NotInitializedError: this process is no worker.
        TypeError: the callback cannot be called.
    """

    def tell(event: WorkerEvent) -> None:
        if isinstance(event, WorkerJoined):
            callback(event.worker)

    return _subscribe(callback, tell)


def on_worker_left(callback: Callable[[WorkerInfo, str], object]) -> WorkerEventHandle:
    """Has a function called with each worker that shuts down, or is lost, from now on, and with the reason.

    Every worker among `workers` of the returned handle, and every worker that joins later, is told of exactly once
    when it goes. This worker connects to all others for that, since a loss shows by a connection. Of a group that
    shuts down gracefully together, workers may or may not be told of the others. See `on_worker_joined` for when
    and where callbacks run.

    Args:
        callback: called with the worker, which can be called no more, and the reason as a WorkerLostError has it.

    Returns:
        A handle; `handle.remove()` removes the callback, as the end of a `with` block of the handle does.

    Raises:
        NotInitializedError: this process is no worker.
        TypeError: the callback cannot be called.
    """

    def tell(event: WorkerEvent) -> None:
        if isinstance(event, WorkerLeft):
            callback(event.worker, event.reason)

    return _subscribe(callback, tell)


def _subscribe(callback: object, tell: Callable[[WorkerEvent], object]) -> WorkerEventHandle:
    if not callable(callback):
        raise TypeError(f"callback is {callback!r}, which cannot be called")
    return current_agent().worker_events.subscribe(tell)


def get_rpc_timeout() -> float:
    """Seconds that a call without a timeout of its own may take; 0 for any."""
    return current_agent().rpc_timeout


def set_rpc_timeout(seconds: float) -> None:
    """Sets what `get_rpc_timeout` tells, for the calls from now on. Raises ValueError."""
    current_agent().rpc_timeout = check_rpc_timeout(seconds)


def debug_info() -> Mapping[str, Any]:
    """Counts of what is alive on this worker (calls, references, contexts, threads) and of what it has sent.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return current_agent().debug_info()


def require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Has a function raise NotInitializedError, before it does anything, where `init_rpc` was not called."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        current_agent()
        return func(*args, **kwargs)

    return wrapper


def _leave_at_exit(agent: RpcAgent, stale: BaseException | None) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # pressed again: then not all is told to everybody
        agent.leave_at_exit(WorkerEnd.of_this_process(stale))
    holder.forget(agent)


def _choose(
    backend: BackendType | str | None, options: RpcBackendOptions | None
) -> tuple[BackendType, RpcBackendOptions]:
    """The backend and its options, when either or neither is given."""
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, but it is {options!r}"
        )
    if backend is None:
        return _backend_of(options), options or RpcBackendOptions()
    if isinstance(backend, str):
        kind = BackendType.__members__.get(backend.upper())
        if kind is None:
            known = ", ".join(repr(each.name) for each in BackendType)
            raise ValueError(f"backend is {backend!r}: the registered ones are {known}; or leave it out")
    elif isinstance(backend, BackendType):
        kind = backend
    else:
        raise TypeError(f"Argument backend must be a member of BackendType, but it is {backend!r}")
    if options is None:
        return kind, construct_rpc_backend_options(kind)
    # Other backends see to it themselves: they may take options of their relatives.
    if kind is BackendType.GRADWIRE and (theirs := _backend_of(options)) is not kind:
        raise TypeError(f"backend is {kind!r}, but the options, {options!r}, are those of {theirs!r}")
    return kind, options


def _backend_of(options: RpcBackendOptions | None) -> BackendType:
    if options is None or type(options) is RpcBackendOptions:
        return BackendType.GRADWIRE
    if (found := _find_backend_of(options)) is None:
        raise TypeError(f"Could not infer backend for options {options}: pass backend=")
    return found


def _find_backend_of(options: RpcBackendOptions) -> BackendType | None:
    candidates = (each for each in BackendType if type(construct_rpc_backend_options(each)) is type(options))
    return next(candidates, None)
