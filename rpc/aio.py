"""Calls, streams and worker events for asyncio programs.

    result = await aio.call("worker1", torch.add, (a, b))
    first, second = await asyncio.gather(rpc.rpc_async("worker1", f), rpc.rpc_async("worker2", f))
    value = await rref.to_here_async()
    async with rpc.rpc_stream("worker1", read, (path,)) as items:
        async for item in items: ...
    async for event in aio.worker_events(): ...

The futures of calls can be awaited in any event loop. Cancelling the task that awaits a future cancels the call,
as `future.cancel()` does, unless the task awaits it through `asyncio.shield`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, overload

import torch

from .calls.sending import send_call_async
from .contracts.agent import Destination, current_agent
from .contracts.messages import UNSET_RPC_TIMEOUT
from .contracts.worker_events import WorkerEventStream
from .execution.futures import wait_async

__all__ = ["WorkerEventStream", "call", "wait", "worker_events"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@overload
async def call(
    to: Destination,
    func: Callable[[*Ts], R],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
    *,
    idempotent: bool = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
    idempotent: bool = ...,
) -> R: ...


async def call(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    idempotent: bool = False,
) -> Any:
    """Runs a function on a worker and returns its result. Takes and raises what `rpc_sync` does.

    Cancelling the task that awaits it cancels the call: see `Future.cancel`. While more is in flight than
    FlowControlOptions allow, only this task waits, while `rpc_async` in a coroutine raises SendQueueFullError.
    """
    return await (await send_call_async(to, func, args, kwargs, timeout, idempotent=idempotent))


async def wait(future: torch.futures.Future[R]) -> R:
    """Waits for any torch future, such as one from `then` or `collect_all`, and returns its value.

    Cancelling the wait cancels the call if the future is that of a call, and nothing otherwise.

    Raises:
        Exception: the exception of the future.
    """
    return await wait_async(future)


def worker_events() -> WorkerEventStream:
    """Returns an asynchronous iterator of the workers that join, leave or do not answer from now on.

        async for event in aio.worker_events():
            match event:
                case rpc.WorkerJoined(worker): ...
                case rpc.WorkerLeft(worker, reason): ...
                case rpc.WorkerSuspect(worker, reason): ...
                case rpc.WorkerBack(worker): ...

    `workers` of the iterator are the workers that are present now, this one too. Each worker is either among them
    or has a WorkerJoined; each has one WorkerLeft when it leaves. A worker that does not answer for a while has a
    WorkerSuspect, and a WorkerBack when it answers again. Events are queued without a bound until they are read.
    The iteration ends when this worker shuts down.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return current_agent().worker_events.stream()
