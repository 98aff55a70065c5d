"""Generators as remote functions: their items come back one after the other, as they are consumed.

A stream is one STREAM_OPEN request, which is answered when the generator is through; so whatever ends a call
ends a stream: an error, a lost worker, a cancellation. Items are messages to the consumer that name the
request and their index. What has been consumed is told to the producer, which runs the generator only while
less than a window is unconsumed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, TypeVarTuple, final, overload

from ...errors import NotInitializedError, RpcTimeoutError, WorkerLostError
from ...proto.v1 import agent_pb2
from ..contracts.agent import Destination, RpcAgent, current_agent
from ..contracts.arguments import CALL_PARTS, UNSET_RPC_TIMEOUT, check_call, check_timeout
from ..contracts.extension import Extension
from ..contracts.messages import Deferred, Handler, Incoming, MessageType, Request
from ..contracts.options import MIB
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from .consumer import CLOSE, NothingYetError, StreamConsumer
from .producer import StreamProducer, items_of

__all__ = ["RpcStream", "Streams", "rpc_stream"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")

Items = Iterable[T] | AsyncIterable[T]
"""What a function that can be streamed returns."""

WINDOW_BYTES = 16 * MIB
WINDOW_ITEMS = 1024


@final
class Streams(Extension):
    """The open streams of one agent, at both of their ends."""

    control_kinds = (CLOSE,)

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._consumers: dict[int, StreamConsumer] = {}
        self._producers: dict[tuple[int, int], StreamProducer] = {}
        agent.control.on(CLOSE, self._on_close)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Opening, items, and what is said about them."""
        return {
            MessageType.STREAM_OPEN: Handler(
                self._open,
                user_values=True,
                cancellable=True,
                operation="rpc_stream",
                description="the request of a stream from worker",
            ),
            MessageType.STREAM_OPENED: Handler(self._on_opened),
            MessageType.STREAM_ITEM: Handler(self._on_item, user_values=True),
            MessageType.STREAM_CREDIT: Handler(self._on_credit),
        }

    # The consuming end.

    def consume(self, worker: WorkerInfo, call: tuple[Any, ...], window: int, window_items: int) -> StreamConsumer:
        """Asks a worker for a stream."""
        consumer = StreamConsumer(self.agent, worker, window_items, window, self._forget)

        def head(envelope: agent_pb2.Envelope) -> None:
            consumer.head(envelope)
            self._consumers[consumer.id] = consumer

        try:
            answer = self.agent.request(
                worker, Request(MessageType.STREAM_OPEN, call, timeout=0, what=CALL_PARTS, header=head)
            )
        except BaseException:
            self._forget(consumer)
            raise
        consumer.answered_by(answer)
        return consumer

    def _forget(self, consumer: StreamConsumer) -> None:
        self._consumers.pop(consumer.id, None)

    def _on_opened(self, message: Incoming) -> None:
        consumer = self._consumers.get(message.envelope.stream.stream_id)
        if consumer is None or not consumer.opened():
            self.agent.control.send(message.source, CLOSE, message.envelope.stream.stream_id)

    def _on_item(self, message: Incoming) -> None:
        if (consumer := self._consumer_of(message)) is not None:
            consumer.put(message.envelope.stream.items, message.value, None, message.nbytes)

    def scope(self, message: Incoming) -> AbstractContextManager[None]:
        """Around the reading of an item: what goes wrong with it is raised by the stream, in its place."""
        return self._reading(message) if message.envelope.type == MessageType.STREAM_ITEM else nullcontext()

    @contextmanager
    def _reading(self, message: Incoming) -> Iterator[None]:
        try:
            yield
        finally:
            if isinstance(message.error, Exception):
                self.on_decode_error(message, message.error.with_traceback(None))

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Puts the error in an item's place."""
        if message.envelope.type != MessageType.STREAM_ITEM:
            return
        if (consumer := self._consumer_of(message)) is not None:
            consumer.put(message.envelope.stream.items, None, error, 0)

    def _consumer_of(self, message: Incoming) -> StreamConsumer | None:
        consumer = self._consumers.get(message.envelope.stream.stream_id)
        return consumer if consumer is not None and consumer.producer == message.source else None

    # The producing end.

    def _open(self, message: Incoming) -> Deferred:
        function, args, kwargs = message.value
        items = items_of(self.agent, function, function(*args, **kwargs))
        # A stream may live long: from here on its arguments belong to the generator alone.
        message.value, message.body, message.tensors, message.references = None, b"", [], []
        producer = StreamProducer(self.agent, message, items)
        key = (producer.consumer.id, producer.id)
        self._producers[key] = producer
        producer.done.add_done_callback(lambda _: self._producers.pop(key, None))
        try:
            self._post_about(message, MessageType.STREAM_OPENED)
        except BaseException:
            self.agent.submit(producer.close)
            raise
        if self.agent.end_of(producer.consumer.id) is not None:
            producer.close()  # `on_worker_lost` may have been told before this stream was there
        self.agent.submit(producer.advance)
        return Deferred(producer.done)

    def _on_credit(self, message: Incoming) -> None:
        if (producer := self._producer_of(message)) is not None:
            producer.credit(message.envelope.stream.items, message.envelope.stream.nbytes)

    def _on_close(self, sender: WorkerInfo, stream_id: Any) -> None:
        if (producer := self._producers.get((sender.id, stream_id))) is not None:
            self.agent.submit(producer.close)  # which may wait for others

    def _producer_of(self, message: Incoming) -> StreamProducer | None:
        return self._producers.get((message.source.id, message.envelope.stream.stream_id))

    # Both.

    def _post_about(self, message: Incoming, kind: MessageType.ValueType) -> None:
        """Tells the other end of a message's stream something."""
        stream_id = message.envelope.stream.stream_id or message.envelope.id

        def head(envelope: agent_pb2.Envelope) -> None:
            envelope.stream.stream_id = stream_id

        with contextlib.suppress(WorkerLostError):
            self.agent.post(message.source, kind, None, header=head)

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Ends the streams from and to a worker."""
        error = end.as_error(worker.name)
        for consumer in list(self._consumers.values()):
            if consumer.producer == worker:
                consumer.broken(error)
        for producer in list(self._producers.values()):
            if producer.consumer == worker:
                self.agent.submit(producer.close)  # which may wait for others

    def live_objects(self) -> Mapping[str, int]:
        """Open streams by end, and the bytes of their items that nobody has consumed."""
        consumers, producers = list(self._consumers.values()), list(self._producers.values())
        return {
            "num_consumed_streams": len(consumers),
            "num_produced_streams": len(producers),
            "stream_bytes_received": sum(consumer.buffered_bytes for consumer in consumers),
            "stream_bytes_sent": sum(producer.unconsumed_bytes for producer in producers),
        }

    def close(self) -> None:
        """Closes the generators, and ends the wait for items."""
        for producer in list(self._producers.values()):
            producer.close()
        error = NotInitializedError(f"worker {self.agent.info.name!r} has shut down its RPC agent")
        for consumer in list(self._consumers.values()):
            consumer.broken(error)


@final
class RpcStream(Generic[T_co]):
    """The items of a generator that runs on another worker. Iterate over it, once, with `for` or `async for`.

    It is a context manager, ordinary and asynchronous, that closes itself. A stream that nobody refers to any
    more is closed too.
    """

    def __init__(self, agent: RpcAgent, consumer: StreamConsumer, timeout: float) -> None:
        self._agent = agent
        self._consumer = consumer
        self._timeout = timeout

    def __repr__(self) -> str:
        state = "over" if self._consumer.over else "open"
        return f"RpcStream(from {self._consumer.producer.name!r}, {state})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        """The next item; waits for it.

        Raises:
            StopIteration: there is none, or the stream is closed.
            Exception: what the generator raised, after the items before it.
            RpcTimeoutError: it did not come in time. The stream is closed.
            WorkerLostError: the producer is gone. Items that it had sent come first.
        """
        while True:
            try:
                item: T_co = self._consumer.take()
                return item
            except NothingYetError:
                pass
            with self._agent.blocking():
                in_time = self._consumer.wait(self._timeout or None)
            if not in_time:
                self._give_up()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        """The next item, as `next` gives and raises. Cancelling the wait loses no item."""
        while True:
            try:
                item: T_co = self._consumer.take()
                return item
            except StopIteration:
                raise StopAsyncIteration from None
            except NothingYetError:
                pass
            try:
                async with asyncio.timeout(self._timeout or None):
                    await self._wait_in_loop()
            except TimeoutError:
                self._give_up()

    async def _wait_in_loop(self) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(woken.set)

        try:
            if self._consumer.wake(wake):
                await woken.wait()
        finally:
            self._consumer.forget(wake)

    def _give_up(self) -> None:
        self.close()
        doing = "waiting for the next item of a stream from worker"
        raise RpcTimeoutError(self._consumer.producer.name, self._timeout, doing)

    def close(self) -> None:
        """Takes no more items, and has the producer close its generator. Does not wait until it has."""
        self._consumer.close()

    async def aclose(self) -> None:
        """Does what `close` does, which blocks nobody."""
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
        if not self._consumer.over:
            self._agent.control.run(self._consumer.close)  # elsewhere: a finalizer takes no lock


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
    """Runs a generator on a worker and returns a stream of its items at once.

    The generator runs ahead of its consumer, but is not advanced while `window` bytes or `window_items`
    items have been sent and not been consumed.

    Args:
        to: a worker's name, id or WorkerInfo; this worker itself too.
        func: a generator function that the other worker can import, an asynchronous one, or a function that
            returns an iterator. Its items are anything that a call's result can be. As with arguments, leave
            a tensor that was yielded as it is.
        args: its positional arguments.
        kwargs: its named arguments.
        timeout: seconds to wait for each item, 0 for none. By default that of the options.
        window: bytes of items on their way or waiting at the consumer beyond which the generator pauses. An
            item is counted once it is there, so it can be this much and one item.
        window_items: items, likewise.

    Returns:
        The stream; what goes wrong is raised when it is iterated over.

    Raises:
        NotInitializedError, UnknownWorkerError, SerializationError, TypeError, ValueError: nothing was sent.
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
