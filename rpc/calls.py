"""Running functions on other workers."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple, cast, final, overload

import torch

from ..errors import RpcError
from ..torch_internals import AnyFuture
from .contracts.agent import Destination, current_agent
from .contracts.arguments import CALL_PARTS, UNSET_RPC_TIMEOUT, check_call, check_timeout
from .contracts.extension import Extension
from .contracts.messages import Deferred, Handler, Incoming, MessageType, Request
from .contracts.worker import WorkerInfo
from .execution.futures import Future, when_done
from .execution.script_functions import run_script_function
from .functions import is_async_execution
from .profiling.extension import RPCExecMode, profiled_call, run_profiled
from .wait_all import note_future
from .wire.script import not_scriptable
from .wire.tracebacks import users_traceback

__all__ = [
    "Calls",
    "broadcast_call",
    "logged",
    "name_of",
    "rpc_async",
    "rpc_sync",
    "run_function",
    "send_call",
]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)

CALLS_USERS = ("run_function",)
"""See tracebacks.py."""


@final
class Calls(Extension):
    """Serves CALL messages."""

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """The one type."""
        return {
            MessageType.CALL: Handler(
                self._run,
                user_values=True,
                cancellable=True,
                operation="rpc_async",
                description="a call to worker",
            )
        }

    def _run(self, message: Incoming) -> Any:
        with logged(message):
            return run_profiled(message, run_function, *message.value)


@contextmanager
def logged(message: Incoming) -> Iterator[None]:
    """Logs what a function raises that another worker calls: it may be of more use here than there."""
    try:
        yield
    except BaseException as error:
        trace = (type(error), error, users_traceback(error))
        log.info("a call from worker %s failed", message.source.name, exc_info=trace)
        raise


def run_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs a function for another worker.

    Returns:
        Its result; a Deferred if the function answers later.

    Raises:
        RpcError: it is marked with `async_execution` and returned no future.
        Exception: what the function raises.
    """
    if isinstance(function, torch.jit.ScriptFunction):
        return run_script_function(function, args, kwargs)
    result = function(*args, **kwargs)
    if not is_async_execution(function):
        return result
    if not isinstance(result, AnyFuture):  # what `then` returns is no torch.futures.Future
        name = getattr(function, "__qualname__", function)
        raise RpcError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {name} returned a {type(result).__name__}"
        )
    return Deferred(when_done(cast(torch.futures.Future[Any], result)))


def name_of(function: Callable[..., Any]) -> str:
    """Returns what people call a function, or anything else that can be called."""
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
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
) -> Future[R]: ...


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
) -> Future[R]: ...


@not_scriptable
def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Runs a function on a worker and returns a future of its result at once.

    Args:
        to: a worker's name, id or WorkerInfo; this worker itself too.
        func: a function or class that the other worker can import.
        args: its positional arguments: anything that pickles. Large tensors are sent from where they are, so
            leave them as they are until the future is done.
        kwargs: its named arguments.
        timeout: seconds, 0 for none. By default that of the options.

    Returns:
        A torch future. It fails with the exception that the function raised, whose `__cause__` is a
        RemoteError with the remote traceback; with RpcTimeoutError; or with WorkerLostError.

    Raises:
        NotInitializedError, UnknownWorkerError, SerializationError, TypeError, ValueError: nothing was sent.
    """
    future = send_call(to, func, args, kwargs, timeout)
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
) -> Future[Any]:
    """Does what `rpc_async` does, but `wait_all` does not see it.

    `keep` is kept until the call is over. `name` is what the future calls the function if not by its own name.
    """
    agent = current_agent()
    worker = agent.worker(to)
    call = check_call(func, args, kwargs)
    seconds = check_timeout(timeout)
    with profiled_call(agent, mode, func, worker):
        request = Request(MessageType.CALL, call, timeout=seconds, what=CALL_PARTS, keep=keep)
        future = agent.request(worker, request)
    future.operation = f"rpc_{mode.value} {name or name_of(func)}"
    return future


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[*Ts], R],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
) -> R: ...


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
) -> R: ...


@not_scriptable
def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs a function on a worker and returns its result. Takes and raises what `rpc_async` does."""
    return send_call(to, func, args, kwargs, timeout, mode=RPCExecMode.SYNC).wait()


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

    It does what `rpc_async` does to each of them, but pickles the arguments once, and in a static group large CPU
    tensors leave this worker once, by a process group of all receivers: see BroadcastOptions.

    Args:
        names: workers, each by its name, id or WorkerInfo; this worker too.
        func: see `rpc_async`.
        args: its positional arguments. Tensors are sent from where they are: leave them as they are until all
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
        Request(MessageType.CALL, call, timeout=seconds, what=CALL_PARTS),
        around=lambda worker: profiled_call(agent, RPCExecMode.ASYNC, func, worker),
    )
    for future in futures:
        future.operation = f"broadcast_call {name_of(func)}"
        note_future(future)
    return futures
