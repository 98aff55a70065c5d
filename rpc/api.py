"""The functions by which a program joins a group of workers, asks about it, and leaves it."""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Any, ParamSpec, TypeVar

from ..c10d.rendezvous.api import rendezvous
from ..c10d.rendezvous.start_barrier import GroupKind
from ..c10d.torch_types import TorchStore
from ..errors import NotInitializedError, RpcError
from ..net.inheritance import at_fork, why_grpc_is_unusable
from .backend_registry import BackendType, construct_rpc_backend_options, init_backend
from .contracts.agent import Destination, RpcAgent, current_agent, holder, leave_agents_to_parent
from .contracts.options import RpcBackendOptions, check_rpc_timeout
from .contracts.worker import WorkerEnd, WorkerInfo, check_worker_name, last_uncaught_error, noting_error_of_child
from .contracts.worker_events import (
    WorkerBack,
    WorkerEvent,
    WorkerEventHandle,
    WorkerJoined,
    WorkerLeft,
    WorkerSuspect,
)
from .execution.ctrl_c import ctrl_c
from .membership.addresses import check_consent

__all__ = [
    "debug_info",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "leave",
    "on_worker_back",
    "on_worker_joined",
    "on_worker_left",
    "on_worker_suspect",
    "require_initialized",
    "set_rpc_timeout",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=WorkerEvent)

LEAVE_PRIORITY = 110
"""The priority of leaving at interpreter exit: before process groups and stores are closed, whose numbers are
lower."""

_init_lock = threading.Lock()
"""Held by `init_rpc`, so that a process has at most one agent."""


def is_available() -> bool:
    """Returns whether this process can use RPC: always True, as gradwire needs no optional parts of torch."""
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
    """Makes this process a worker and joins its group.

    In a static group, whose size is known, it blocks until all workers have joined and can be called. Those on one
    host return at nearly the same time, within a millisecond if the machine is idle. In a dynamic group workers
    join and leave at any time, and it blocks until the current members know the new one. Long waits are logged
    as warnings that name the missing workers, after 10 seconds and then at doubling intervals.

    If the workers are on several hosts, all of them need credentials, such as GRADWIRE_TOKEN in the environment
    (docs/security.md), and a MASTER_ADDR or `init_method` at which they reach rank 0. The option `host` is for
    hosts with several addresses (docs/hosts.md).

    Args:
        name: the name of this worker, unique in the group.
        backend: a member of BackendType, or its name. By default the backend that the options belong to.
        rank: 0 to world_size - 1. By default RANK of the environment, or the rank in the URL. In a dynamic group
            any number that no worker has had; by default a free one.
        world_size: the number of workers. By default WORLD_SIZE of the environment, or the size in the URL.
            Without any of these the group is dynamic. With env:// and neither, what srun, mpiexec or Kubernetes
            says counts (docs/launch.md).
        rpc_backend_options: see RpcBackendOptions.
        store: any torch store, for rendezvous instead of the options' `init_method`. It is not closed.

    Raises:
        RendezvousError: the workers did not find each other, or contradict each other; then all raise the same.
        RpcError: this process is a worker already.
        NotInitializedError: this process is a child that a worker, or another user of gRPC, has forked.
        TypeError, ValueError: an argument is invalid.
    """
    if holder.parents is not None:
        raise holder.why_none()
    if why := why_grpc_is_unusable():
        raise NotInitializedError(why)
    kind, options = _choose_backend(backend, rpc_backend_options)
    check_worker_name(name)
    check_consent(options)
    if (credentials := options.find_credentials()) is not None:
        credentials.identity(name)  # raises at once if they are not valid
    with _init_lock, ExitStack() as opened:
        if (running := holder.get()) is not None and running.is_ending:
            running.shutdown(graceful=False, timeout=0)  # which waits for the end
            running = holder.get()
        if running is not None:
            raise RpcError(f"RPC is already initialized: this process is worker {running.info.name!r}")
        met = rendezvous(
            None if store is not None else options.init_method,
            rank=rank,
            world_size=world_size or None,
            store=store,
            timeout=options.init_timeout,
            insecure=options.insecure,
            credentials=credentials,
            dynamic=True,
            name=name,
            kind=GroupKind("rpc", options.CONSENT, may_rejoin=True),
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
        # gRPC must not be torn down while it runs, so a program that ends without shutdown leaves here. Unlike
        # atexit, Finalize also runs in the children of multiprocessing, and not in forks of this process.
        opened.enter_context(noting_error_of_child())
        opened.enter_context(ctrl_c.held_back())
        leave = Finalize(None, _leave_at_exit, (agent, last_uncaught_error()), exitpriority=LEAVE_PRIORITY)
        opened.callback(leave.cancel)
        holder.set_default(agent, opened.pop_all())


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the group; this process is no worker any more. Does nothing if it has been called before.

    Any thread may call this, and so may a remote function, a callback, a handler of a signal, a finalizer and a
    function of `atexit`; also while another thread, or what the handler has interrupted, waits in a graceful
    shutdown. `graceful=False` ends that at once, as a timeout does, and it returns without an error.
    docs/call_failures.md says where a call returns before this process has left.

    Args:
        graceful: True to wait so that no call is lost: in a static group until all workers, except those that have
            died, have called shutdown and no call is in flight anywhere; in a dynamic group until no call from
            or to this worker is in flight. False to leave at once.
        timeout: seconds to wait, 0 for no limit. After a timeout this worker leaves, too.

    Raises:
        NotInitializedError: this process has not been a worker.
        RpcTimeoutError: the wait took longer; the error names the workers or calls it has waited for.
    """
    leave(graceful, timeout)


def leave(graceful: bool, timeout: float, join: Callable[[], None] | None = None) -> None:
    """Leaves the group as `shutdown` does; `join` waits in place of the agent's `join`."""
    agent = holder.get()
    if agent is None and holder.has_had_one:
        return
    agent = current_agent()
    how = {} if join is None else {"join": join}
    try:
        agent.shutdown(graceful=graceful, timeout=timeout, **how)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without the frames of the wait
    finally:
        if agent.has_ended:
            holder.clear(agent)


def get_worker_info(worker_name: Destination | None = None) -> WorkerInfo:
    """Returns a worker's name and id.

    Args:
        worker_name: the worker's name, id or WorkerInfo; None for this worker.

    Raises:
        NotInitializedError: this process is no worker.
        UnknownWorkerError: there is no such worker.
    """
    agent = current_agent()
    return agent.info if worker_name is None else agent.worker(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """Returns the workers of the group, including this one, sorted by id.

    In a static group these are all workers, even those that are lost; in a dynamic group the current members.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return list(current_agent().workers())


def on_worker_joined(callback: Callable[[WorkerInfo], object]) -> WorkerEventHandle:
    """Calls a function with each worker that joins the group from now on.

    `workers` of the returned handle are the workers that are present now, this one too. Each worker is among them
    or passed to the callback, exactly once. After `init_rpc` has returned, the only workers that
    join a static group are those that have been started again under their names.

    All callbacks of this function and of `on_worker_left` run one after another, in the order of the events, on a
    thread that runs incoming calls. They may make calls; one that blocks delays the others. Errors that a callback
    raises are logged. No callback starts after `shutdown`.

    Args:
        callback: called with the worker's WorkerInfo, when the worker can be called.

    Returns:
        A handle. `handle.remove()`, or the end of a `with` block of the handle, removes the callback.

    Raises:
        NotInitializedError: this process is no worker.
        TypeError: the callback is not callable.
    """
    return _subscribe(callback, WorkerJoined, lambda event: callback(event.worker))


def on_worker_left(callback: Callable[[WorkerInfo, str], object]) -> WorkerEventHandle:
    """Calls a function with each worker that shuts down or is lost from now on, and the reason.

    Every worker among `workers` of the returned handle, and every worker that joins later, is passed exactly
    once when it leaves. For that this worker connects to all others, because only the loss of a connected worker
    is noticed. When all workers shut down gracefully together, some may be passed to others. See
    `on_worker_joined` for when and where callbacks run.

    Args:
        callback: called with the worker's WorkerInfo and the reason as in WorkerLostError, when calls to it fail.

    Returns:
        A handle. `handle.remove()`, or the end of a `with` block of the handle, removes the callback.

    Raises:
        NotInitializedError: this process is no worker.
        TypeError: the callback is not callable.
    """
    return _subscribe(callback, WorkerLeft, lambda event: callback(event.worker, event.reason))


def on_worker_suspect(callback: Callable[[WorkerInfo, str], object]) -> WorkerEventHandle:
    """Calls a function with each worker that does not answer from now on, and the reason.

    The worker may come back: see `Liveness`, `on_worker_back` and `on_worker_left`, one of which follows. As
    `on_worker_left`, this connects to all workers. See `on_worker_joined` for when and where callbacks run.

    Args:
        callback: called with the worker's WorkerInfo and the reason as in WorkerSuspectError.

    Returns:
        A handle. `handle.remove()`, or the end of a `with` block of the handle, removes the callback.

    Raises:
        NotInitializedError: this process is no worker.
        TypeError: the callback is not callable.
    """
    return _subscribe(callback, WorkerSuspect, lambda event: callback(event.worker, event.reason))


def on_worker_back(callback: Callable[[WorkerInfo], object]) -> WorkerEventHandle:
    """Calls a function with each suspect worker that answers again from now on.

    See `on_worker_joined` for when and where callbacks run.

    Args:
        callback: called with the worker's WorkerInfo, when the worker can be called.

    Returns:
        A handle. `handle.remove()`, or the end of a `with` block of the handle, removes the callback.

    Raises:
        NotInitializedError: this process is no worker.
        TypeError: the callback is not callable.
    """
    return _subscribe(callback, WorkerBack, lambda event: callback(event.worker))


def _subscribe(callback: object, kind: type[E], pass_on: Callable[[E], object]) -> WorkerEventHandle:
    """Has the events of one kind passed on to a callback. Raises TypeError if that is none."""
    if not callable(callback):
        raise TypeError(f"callback is {callback!r}, which cannot be called")

    def on_event(event: WorkerEvent) -> None:
        if isinstance(event, kind):
            pass_on(event)

    return current_agent().worker_events.subscribe(on_event)


def get_rpc_timeout() -> float:
    """Returns the timeout, in seconds, of calls that are not given one; 0 is no limit."""
    return current_agent().rpc_timeout


def set_rpc_timeout(seconds: float) -> None:
    """Sets the timeout, in seconds, of later calls that are not given one; 0 is no limit. Raises ValueError."""
    current_agent().rpc_timeout = check_rpc_timeout("rpc_timeout", seconds)


def debug_info() -> Mapping[str, Any]:
    """Returns counts of this worker's calls, references, contexts and threads, and of what it has sent.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return current_agent().debug_info()


def require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function raises NotInitializedError, before anything else, if this process is no worker."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        current_agent()
        return func(*args, **kwargs)

    return wrapper


def _leave_at_exit(agent: RpcAgent, earlier_error: BaseException | None) -> None:
    """Leaves the group at interpreter exit.

    Args:
        agent: the agent.
        earlier_error: what `last_uncaught_error` returned at `init_rpc`, which did not end this process.
    """
    # Ctrl-C or another signal again: some workers may not get the goodbye.
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        agent.leave_at_exit(WorkerEnd.of_this_process(earlier_error))
    holder.clear(agent)


def _choose_backend(
    backend: BackendType | str | None, options: RpcBackendOptions | None
) -> tuple[BackendType, RpcBackendOptions]:
    """Returns the backend and its options, when both, one or none of them are given."""
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
    # Other backends check their options themselves: they may accept those of a related backend.
    if kind is BackendType.GRADWIRE and (owner := _backend_of(options)) is not kind:
        raise TypeError(f"backend is {kind!r}, but the options, {options!r}, are those of {owner!r}")
    return kind, options


def _backend_of(options: RpcBackendOptions | None) -> BackendType:
    if options is None or type(options) is RpcBackendOptions:
        return BackendType.GRADWIRE
    for each in BackendType:
        if type(construct_rpc_backend_options(each)) is type(options):
            return each
    raise TypeError(f"Could not infer backend for options {options}: pass backend=")


at_fork(in_child=leave_agents_to_parent)  # registered last, so that nothing writes any more when they are left
