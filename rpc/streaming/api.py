"""`rpc.rpc_stream`, and the stream of items that it returns."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, TypeVarTuple, final, overload

from ...errors import RpcTimeoutError
from ..contracts.agent import Destination, RpcAgent, current_agent
from ..contracts.messages import UNSET_RPC_TIMEOUT, check_call, check_timeout
from ..contracts.options import MIB
from .consumer import ItemNotReadyError, StreamConsumer
from .streams import Streams

__all__ = ["RpcStream", "rpc_stream"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")

Items = Iterable[T] | AsyncIterable[T]
"""The return type of a function that can be streamed."""

WINDOW_BYTES = 16 * MIB
WINDOW_ITEMS = 1024


@final
class RpcStream(Generic[T_co]):
    """The items of a generator that runs on another worker, to be iterated over once with `for` or `async for`.

    As a context manager, `with` or `async with`, it closes itself at the end of the block. It is also closed when
    the last reference to it is gone.
    """

    def __init__(self, agent: RpcAgent, consumer: StreamConsumer, timeout: float) -> None:
        self._agent = agent
        self._consumer = consumer
        self._timeout = timeout

    def __repr__(self) -> str:
        state = "closed" if self._consumer.is_done else "open"
        return f"RpcStream(from {self._consumer.producer.name!r}, {state})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        """Returns the next item; waits for it.

        Raises:
            StopIteration: the generator has ended, or the stream is closed.
            Exception: what the generator raised, after the items before it.
            RpcTimeoutError: the item did not arrive in time. The stream is closed then.
            WorkerLostError: the producer is lost, after the items that have arrived.
        """
        while True:
            try:
                item: T_co = self._consumer.take()
                return item
            except ItemNotReadyError:
                pass
            with self._agent.blocking():
                in_time = self._consumer.wait(self._timeout or None)
            if not in_time:
                self._time_out()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        """Returns the next item, as `next` does, without blocking the event loop. Cancelling it loses no item."""
        while True:
            try:
                item: T_co = self._consumer.take()
                return item
            except StopIteration:
                raise StopAsyncIteration from None
            except ItemNotReadyError:
                pass
            try:
                async with asyncio.timeout(self._timeout or None):
                    await self._wait_in_loop()
            except TimeoutError:
                self._time_out()

    async def _wait_in_loop(self) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits in it
                loop.call_soon_threadsafe(woken.set)

        try:
            if self._consumer.add_waker(wake):
                await woken.wait()
        finally:
            self._consumer.remove_waker(wake)

    def _time_out(self) -> NoReturn:
        self.close()
        doing = "waiting for the next item of a stream from worker"
        raise RpcTimeoutError(self._consumer.producer.name, self._timeout, doing)

    def close(self) -> None:
        """Drops the items that have not been taken, and has the producer close its generator, without waiting."""
        self._consumer.close()

    async def aclose(self) -> None:
        """Closes the stream; does not block."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._consumer.is_done:
            self._agent.control.run(self._consumer.close)  # on the control thread: a finalizer takes no lock


@overload
def rpc_stream(
    to: Destination,
    func: Callable[[*Ts], Items[T]],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
    *,
    window: int = ...,
    window_items: int = ...,
) -> RpcStream[T]: ...


@overload
def rpc_stream(
    to: Destination,
    func: Callable[[], Items[T]],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
    *,
    window: int = ...,
    window_items: int = ...,
) -> RpcStream[T]: ...


@overload
def rpc_stream(
    to: Destination,
    func: Callable[..., Items[T]],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
    *,
    window: int = ...,
    window_items: int = ...,
) -> RpcStream[T]: ...


@overload
def rpc_stream(
    to: Destination,
    func: Callable[..., Items[T]],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
    *,
    window: int = ...,
    window_items: int = ...,
) -> RpcStream[T]: ...


@overload
def rpc_stream(
    to: Destination,
    func: Callable[..., Items[T]],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
    window: int = ...,
    window_items: int = ...,
) -> RpcStream[T]: ...


def rpc_stream(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    window: int = WINDOW_BYTES,
    window_items: int = WINDOW_ITEMS,
) -> RpcStream[Any]:
    """Runs a generator on a worker; returns a stream of its items without waiting.

    The generator runs ahead of its consumer, but pauses while `window` bytes or `window_items` items have been
    sent and not taken.

    Args:
        to: the worker's name, id or WorkerInfo; may be this worker.
        func: a generator function, plain or asynchronous, or a function that returns an iterator. The other worker
            must be able to import it. It may yield whatever a call may return, and must not change a tensor that
            it has yielded.
        args: its positional arguments.
        kwargs: its named arguments.
        timeout: seconds to wait for each item, 0 for no limit. By default that of the options.
        window: bytes of sent items that have not been taken at which the generator pauses. An item counts once it
            is made, so up to a window and one item are in flight.
        window_items: the number of such items at which it pauses.

    Returns:
        The stream. Errors of the generator are raised when it is iterated over.

    Raises:
        NotInitializedError: this process is no worker.
        UnknownWorkerError: there is no such worker.
        SerializationError: an argument does not pickle.
        TypeError, ValueError: an argument is invalid.
    """
    agent = current_agent()
    worker = agent.worker(to)
    call = check_call(func, args, kwargs)
    seconds = check_timeout(timeout)
    for name, value in (("window", window), ("window_items", window_items)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}: give a whole number, at least 1")
    consumer = agent.extension(Streams).consume(worker, call, window, window_items)
    return RpcStream(agent, consumer, agent.rpc_timeout if seconds is None else seconds)
