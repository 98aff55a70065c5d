"""Calls for asyncio programs.

    result = await aio.call("worker1", torch.add, (a, b))
    first, second = await asyncio.gather(rpc.rpc_async("worker1", f), rpc.rpc_async("worker2", f))
    value = await rref.to_here_async()
    async with rpc.rpc_stream("worker1", read, (path,)) as items:
        async for item in items: ...
    async for event in aio.worker_events(): ...

The futures of calls are awaitable as they are, in any event loop. Cancelling the task that awaits one cancels
the call, as `future.cancel()` does; `asyncio.shield` keeps it from that.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, TypeVarTuple, final, overload

import torch

from .calls import rpc_async
from .contracts.agent import Destination, current_agent
from .contracts.arguments import UNSET_RPC_TIMEOUT
from .contracts.worker import WorkerInfo
from .contracts.worker_events import WorkerEvent, WorkerEventBuffer
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
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[[], R],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[..., R],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
) -> R: ...


@overload
async def call(
    to: Destination,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
) -> R: ...


async def call(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs a function on a worker and returns its result. Takes and raises what `rpc_async` does.

    Cancelling it cancels the call: see `Future.cancel`.
    """
    return await rpc_async(to, func, args, kwargs, timeout)


async def wait(future: torch.futures.Future[R]) -> R:
    """Waits for any torch future, such as one that `then` or `collect_all` has made.

    Returns:
        Its result; its exception is raised.

    Cancelling the wait cancels the call if the future is that of one, and nothing otherwise.
    """
    return await wait_async(future)


@final
class WorkerEventStream:
    """The changes of the group since `worker_events` was called, in their order, for one `async for`."""

    def __init__(self, buffer: WorkerEventBuffer) -> None:
        self._buffer = buffer

    @property
    def workers(self) -> Sequence[WorkerInfo]:
        """The workers that were present when `worker_events` was called, by id; their joining is no event."""
        return self._buffer.workers

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WorkerEvent:
        """Returns the next event; waits for it. Cancelling the wait loses none.

        Raises:
            StopAsyncIteration: this worker has shut down, or the stream is closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(woken.set)

            try:
                event = self._buffer.take(wake)
            except StopIteration:
                raise StopAsyncIteration from None
            if event is not None:
                return event
            await woken.wait()

    async def aclose(self) -> None:
        """Takes no more events. Dropping the stream does the same."""
        self._buffer.close()


def worker_events() -> WorkerEventStream:
    """Returns the workers that join and leave from now on, as an asynchronous iterator of events.

        async for event in aio.worker_events():
            match event:
                case rpc.WorkerJoined(worker): ...
                case rpc.WorkerLeft(worker, reason): ...

    `workers` of the stream are those that are present at this moment. Each worker is either among them or has a
    WorkerJoined; when it goes it has one WorkerLeft. Events wait, without a bound, until they are taken. The
    stream ends when this worker shuts down.

    Raises:
        NotInitializedError: this process is no worker.
    """
    return WorkerEventStream(current_agent().worker_events.buffer())
