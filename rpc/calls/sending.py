"""The functions that call other workers: `rpc_sync`, `rpc_async`, `broadcast_call`; and `wait_all`."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, TypeVarTuple, overload

import torch

from ...net.inheritance import at_fork
from ...proto.v1 import agent_pb2
from ...torch_internals import not_scriptable, profiler_enabled
from ..contracts.agent import Destination, current_agent, holder
from ..contracts.messages import CALL, CALL_PARTS, UNSET_RPC_TIMEOUT, Request, check_call, check_timeout
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly
from ..execution.futures import Future, as_concurrent_future
from ..profiling.extension import RPCExecMode, profiled_call

__all__ = [
    "broadcast_call",
    "name_of",
    "note_future",
    "rpc_async",
    "rpc_sync",
    "send_call",
    "send_call_async",
    "thread_futures",
    "wait_all",
    "wait_for_futures",
]

thread_futures = threading.local()
"""Inside `wait_all`, the attribute `future_list` has the futures of this thread's calls."""

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of another callable, for people."""
    name = getattr(function, "__qualname__", "").rpartition("<locals>.")[2]
    if name.startswith("_"):  # torch's functions are methods of a private class
        name = name.rpartition(".")[2]
    return name or type(function).__name__


@overload
def rpc_async(
    to: Destination,
    func: Callable[[*Ts], R],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
    idempotent: bool = ...,
) -> Future[R]: ...


@not_scriptable
def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    idempotent: bool = False,
) -> Future[Any]:
    """Runs a function on a worker and returns a future of its result at once.

    The function runs at most once, unless the call is idempotent. An error says what became of the call: see
    `RpcError.outcome`.

    Args:
        to: a worker's name, id or WorkerInfo; this worker itself too.
        func: a function or class that the other worker can import.
        args: its positional arguments: anything that pickles. Large tensors are sent from the memory they are in,
            so do not change them until the future is done.
        kwargs: its named arguments.
        timeout: seconds, 0 for none. By default that of the options.
        idempotent: whether the function may run more than once. Then the call is sent again when its connection
            fails, to the worker that has the callee's name by then, until the timeout is over; without a timeout
            it waits for such a worker for 60 s. Inside an autograd context it is sent once.

    Returns:
        A torch future of the result. It fails with the exception that the function raised, whose `__cause__` is a
        RemoteError with the remote traceback; with RpcTimeoutError; or with WorkerLostError.

    Raises:
        NotInitializedError, UnknownWorkerError, SerializationError, TypeError, ValueError: nothing was sent.
        SendQueueFullError: nothing was sent, as too much is in flight, and FlowControlOptions or an event loop on
            this thread do not allow to wait.
    """
    future = send_call(to, func, args, kwargs, timeout, idempotent=idempotent)
    note_future(future)
    return future


def send_call(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    mode: RPCExecMode = RPCExecMode.ASYNC,
    keep: object = None,
    name: str | None = None,
    idempotent: bool = False,
    owner: WorkerInfo | None = None,
    header: Callable[[agent_pb2.Envelope], None] | None = None,
) -> Future[Any]:
    """Sends a call as `rpc_async` does, but `wait_all` does not wait for it.

    Profiles show its `mode`, and errors its `name` if that is not the function's own. It keeps an object alive
    until it is answered (`keep`), may fill in headers of its envelope (`header`), and may go to an incarnation of
    a worker that is not the latest one (`owner`).
    """
    agent = current_agent()
    worker = agent.worker(to) if owner is None else owner
    call = check_call(func, args, kwargs)
    seconds = None if timeout == UNSET_RPC_TIMEOUT else check_timeout(timeout)
    request = Request(CALL, call, seconds, CALL_PARTS, header, keep, idempotent)
    if profiler_enabled():
        with profiled_call(agent, mode, func, worker):
            future = agent.request(worker, request)
    else:
        future = agent.request(worker, request)
    future.describe = lambda: f"rpc_{mode.value} {name or name_of(func)}"
    return future


async def send_call_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    idempotent: bool = False,
) -> Future[Any]:
    """Sends a call as `rpc_async` does, but does not block an event loop while too much is in flight."""
    agent = current_agent()
    worker = agent.worker(to)
    seconds = check_timeout(timeout)
    request = Request(CALL, check_call(func, args, kwargs), seconds, CALL_PARTS, idempotent=idempotent)
    with profiled_call(agent, RPCExecMode.ASYNC, func, worker) if profiler_enabled() else nullcontext():
        future = await agent.request_async(worker, request)
    future.describe = lambda: f"rpc_async {name_of(func)}"
    note_future(future)
    return future


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[*Ts], R],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
    idempotent: bool = ...,
) -> R: ...


@not_scriptable
def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    idempotent: bool = False,
) -> Any:
    """Runs a function on a worker and returns its result. Takes and raises what `rpc_async` does."""
    mode = RPCExecMode.SYNC
    return send_call(to, func, args, kwargs, timeout, mode=mode, idempotent=idempotent).wait_for_answer()


@overload
def broadcast_call(
    names: Iterable[Destination],
    func: Callable[[*Ts], R],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
) -> list[Future[R]]: ...


@overload
def broadcast_call(
    names: Iterable[Destination],
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> list[Future[R]]: ...


@overload
def broadcast_call(
    names: Iterable[Destination],
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
) -> list[Future[R]]: ...


@overload
def broadcast_call(
    names: Iterable[Destination],
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
) -> list[Future[R]]: ...


@overload
def broadcast_call(
    names: Iterable[Destination],
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
) -> list[Future[R]]: ...


@not_scriptable
def broadcast_call(
    names: Iterable[Destination],
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Future[Any]]:
    """Runs a function on several workers with the same arguments, and returns futures of the results at once.

    It does what `rpc_async` does to each of them, but pickles the arguments once, and large CPU tensors leave this
    worker once: in shared memory for the receivers on this host, and in a static group by a process group of the
    receivers on other hosts; see BroadcastOptions.

    Args:
        names: workers, each by its name, id or WorkerInfo; this worker too.
        func: see `rpc_async`.
        args: its positional arguments. Tensors are sent from the memory they are in: do not change them until all
            futures are done.
        kwargs: its named arguments.
        timeout: of each call; see `rpc_async`.

    Returns:
        A future for each worker, in the order of `names`. Each fails by itself, with what that of `rpc_async`
        would fail with, or with what keeps this one call from being sent.

    Raises:
        ValueError: a worker is named twice; nothing was sent.
        NotInitializedError, UnknownWorkerError, SerializationError, TypeError: nothing was sent.
    """
    agent = current_agent()
    if isinstance(names, str | WorkerInfo):
        raise TypeError(f"names is {names!r}: give a list of workers, or use rpc_async for one")
    workers = [agent.worker(name) for name in names]
    for worker in workers:
        if workers.count(worker) > 1:
            raise ValueError(f"worker {worker.name!r} is named more than once: name each worker once")
    call = check_call(func, args, kwargs)
    seconds = check_timeout(timeout)
    futures = agent.request_all(
        workers,
        Request(CALL, call, timeout=seconds, label=CALL_PARTS),
        around=lambda worker: profiled_call(agent, RPCExecMode.ASYNC, func, worker),
    )
    for future in futures:
        future.describe = lambda: f"broadcast_call {name_of(func)}"
        note_future(future)
    return futures


@contextmanager
def wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for all futures that `rpc_async` has returned in it on this thread.

        with rpc.wait_all():
            rpc.rpc_async("worker1", f)
            rpc.rpc_async("worker2", f)

    A block inside another waits for its own calls.

    Raises:
        Exception: what a call raised, as soon as it fails. The other calls are not waited for any longer.
    """
    outer = getattr(thread_futures, "future_list", None)
    thread_futures.future_list = []
    try:
        yield
    finally:
        futures = thread_futures.future_list
        if outer is None:
            del thread_futures.future_list
        else:
            thread_futures.future_list = outer
        wait_for_futures(futures)


def _leave_to_parent() -> None:
    """Has a forked child wait for no calls of its parent."""
    if (futures := getattr(thread_futures, "future_list", None)) is not None:
        futures.clear()


at_fork(in_child=_leave_to_parent)


def note_future(future: torch.futures.Future[Any]) -> None:
    """Adds the future of a call to the innermost `wait_all` block of this thread, if there is one."""
    if (futures := getattr(thread_futures, "future_list", None)) is not None:
        futures.append(future)


def wait_for_futures(futures: Sequence[torch.futures.Future[Any]]) -> None:
    """Waits until all futures are done. If one fails, raises its error and waits for the others no longer."""
    # Not torch.futures.wait_all: it takes a Python exception for a value, and so would wait for the others.
    outcomes = [as_concurrent_future(future) for future in futures]
    agent = holder.get()
    with nullcontext() if agent is None else agent.blocking():
        wait_interruptibly(concurrent.futures.wait, outcomes, return_when=concurrent.futures.FIRST_EXCEPTION)
    for future, outcome in zip(futures, outcomes, strict=True):
        if outcome.done() and outcome.exception() is not None:
            future.wait()
