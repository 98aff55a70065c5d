"""`rpc.rpc_stream`: the items that a remote generator yields travel one by one, as their consumer takes them.

A stream is one STREAM_OPEN request, whose answer is sent when the generator ends. So whatever ends a call ends a
stream: an error, a lost worker, a cancellation. Items are messages to the consumer that carry the id of the
request and their index. The consumer tells the producer what it has taken (credit), and the producer runs the
generator only while the items that have been sent and not taken are less than a window.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, TypeVarTuple, final, overload

from ...errors import (
    LimitReachedError,
    NotInitializedError,
    Outcome,
    RpcError,
    RpcTimeoutError,
    WorkerLostError,
    WorkerSuspectError,
)
from ..contracts.agent import Destination, RpcAgent, current_agent
from ..contracts.extension import Extension
from ..contracts.messages import (
    UNSET_RPC_TIMEOUT,
    Deferred,
    Handler,
    Incoming,
    MessageType,
    UnwantedMessageError,
    check_call,
    check_received,
    check_timeout,
)
from ..contracts.options import MIB
from ..contracts.worker import WorkerEnd, WorkerInfo
from .stream_ends import ItemNotReadyError, StreamConsumer, StreamProducer, iterator_of

__all__ = ["RpcStream", "Streams", "rpc_stream"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")

Items = Iterable[T] | AsyncIterable[T]
"""The return type of a function that can be streamed."""

_WINDOW_BYTES = 16 * MIB
_WINDOW_ITEMS = 1024

_MAX_STREAMS_FACTOR = 2
"""Streams to one other worker that are open, at most: the calls that it may have in flight, times this."""


def _check(find: Callable[[Incoming], object], message: Incoming) -> None:
    """Raises UnwantedMessageError if a message belongs to no stream that this worker has with its sender."""
    if find(message) is None:
        raise UnwantedMessageError("there is no such stream between its sender and this worker")


@final
class Streams(Extension):
    """The open streams of one agent: those that it consumes and those that it produces."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._consumers: dict[int, StreamConsumer] = {}
        self._producers: dict[tuple[int, int], StreamProducer] = {}
        flow = agent.options.flow_control
        self._max_produced = _MAX_STREAMS_FACTOR * max(flow.max_in_flight, flow.max_received)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of the STREAM_ messages."""
        return {
            MessageType.STREAM_OPEN: Handler(
                self._open,
                user_values=True,
                cancellable=True,
                operation="rpc_stream",
                description="the request of a stream from worker",
            ),
            MessageType.STREAM_ITEM: Handler(
                self._on_item,
                user_values=True,
                check=partial(_check, self._consumer_of),
                on_error=self.on_decode_error,
            ),
            MessageType.STREAM_CREDIT: Handler(self._on_credit, check=partial(_check, self._producer_of)),
        }

    # Consuming.

    def consume(
        self, worker: WorkerInfo, call: tuple[Any, ...], window_bytes: int, window_items: int
    ) -> StreamConsumer:
        """Requests a stream from a worker and returns its consumer, without waiting; see `rpc_stream`."""
        consumer = StreamConsumer(self.agent, worker, window_items, window_bytes, self._consumers)
        consumer.open(call)
        return consumer

    def _on_item(self, message: Incoming) -> None:
        if (consumer := self._consumer_of(message)) is not None:
            consumer.on_item(message.envelope.stream.items, message.value, None, message.nbytes)

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Replaces an item by the error: it cannot be decoded, or its payloads do not come."""
        if message.envelope.type != MessageType.STREAM_ITEM:
            return
        if (consumer := self._consumer_of(message)) is not None:
            consumer.on_item(message.envelope.stream.items, None, error.with_traceback(None), 0)

    def _consumer_of(self, message: Incoming) -> StreamConsumer | None:
        """Returns the consumer that a message is for; None if it is unknown or the sender is not its producer."""
        consumer = self._consumers.get(message.envelope.stream.stream_id)
        return consumer if consumer is not None and consumer.producer == message.source else None

    # Producing.

    def _open(self, message: Incoming) -> Deferred:
        self._check_count(message.source)
        function, args, kwargs = message.value
        check_received(args)
        items = iterator_of(self.agent, function, function(*args, **kwargs))
        # A stream may last long; from here on only the generator keeps its arguments alive.
        message.value, message.body, message.tensors, message.references = None, b"", [], []
        producer = StreamProducer(self.agent, message, items)
        key = (producer.consumer.wire_id, producer.id)
        self._producers[key] = producer
        producer.done.add_done_callback(lambda _: self._producers.pop(key, None))
        # `on_worker_lost` or `on_worker_suspect` may have run before the producer was registered.
        try:
            self.agent.check_present([producer.consumer.wire_id])
        except (WorkerLostError, WorkerSuspectError) as error:
            producer.close(self._cut_off(error.reason))
        self.agent.submit(producer.advance)
        return Deferred(producer.done, lambda: self.agent.submit(producer.close))  # which runs user code

    def _check_count(self, consumer: WorkerInfo) -> None:
        """Raises LimitReachedError if too many streams to a worker are open."""
        if len(self._producers) >= self._max_produced:
            count = sum(worker == consumer.wire_id for worker, _ in list(self._producers))
            if count >= self._max_produced:
                raise LimitReachedError(
                    f"worker {consumer.name!r} has {count} streams open, of {self._max_produced} at most",
                    f"{_MAX_STREAMS_FACTOR} * max_in_flight={self._max_produced}",
                )

    def _on_credit(self, message: Incoming) -> None:
        if (producer := self._producer_of(message)) is not None:
            producer.on_credit(message.envelope.stream.items, message.envelope.stream.nbytes)

    def _producer_of(self, message: Incoming) -> StreamProducer | None:
        return self._producers.get((message.source.wire_id, message.envelope.stream.stream_id))

    # Both. A stream from a worker that is lost ends as its request does: with the answer, if that has come.

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Ends the streams to a lost worker."""
        self._end_producers(worker, end.reason)

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Ends the streams to a suspect worker, of which items may be lost."""
        self._end_producers(worker, reason)

    def _end_producers(self, worker: WorkerInfo, reason: str) -> None:
        for producer in list(self._producers.values()):
            if producer.consumer == worker:
                # It runs user code, which may block. The worker may be back before, and read the answer.
                self.agent.submit(producer.close, self._cut_off(reason))

    def _cut_off(self, reason: str | None) -> RpcError:
        """Returns the error of a stream that its producer, this worker, ends before its last item."""
        error = RpcError(f"worker {self.agent.info.name!r} has ended the stream before its last item: {reason}")
        error.outcome = Outcome.RAN
        return error

    def live_objects(self) -> Mapping[str, int]:
        """Returns the numbers of open streams, and the bytes of their items that have not been taken."""
        consumers, producers = list(self._consumers.values()), list(self._producers.values())
        return {
            "num_consumed_streams": len(consumers),
            "num_produced_streams": len(producers),
            "stream_bytes_received": sum(consumer.buffered_bytes for consumer in consumers),
            "stream_bytes_sent": sum(producer.outstanding_bytes for producer in producers),
        }

    def close(self) -> None:
        """Closes the generators, and ends the waits for items."""
        for producer in list(self._producers.values()):
            producer.close(self._cut_off("it has shut down its RPC agent"))
        error = NotInitializedError(f"worker {self.agent.info.name!r} has shut down its RPC agent")
        error.outcome = Outcome.UNKNOWN  # they have been requested
        for consumer in list(self._consumers.values()):
            consumer.fail(error)

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, has the consumers raise an error."""
        for consumer in list(self._consumers.values()):
            consumer.leave_to_parent(why_useless())


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
    window: int = _WINDOW_BYTES,
    window_items: int = _WINDOW_ITEMS,
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
