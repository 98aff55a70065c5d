"""Streams of one agent: remote generators whose items travel one by one, as their consumers take them.

A stream is one STREAM_OPEN request, whose answer is sent when the generator ends. So whatever ends a call ends a
stream: an error, a lost worker, a cancellation. Items are messages to the consumer that carry the id of the
request and their index. The consumer tells the producer what it has taken (credit), and the producer runs the
generator only while the items that have been sent and not taken are less than a window.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from ...errors import (
    LimitReachedError,
    NotInitializedError,
    Outcome,
    RpcError,
    WorkerLostError,
    WorkerSuspectError,
)
from ...proto.v1 import agent_pb2
from ..contracts.agent import RpcAgent
from ..contracts.extension import Extension
from ..contracts.messages import (
    CALL_PARTS,
    Deferred,
    Handler,
    Incoming,
    MessageType,
    Request,
    UnwantedMessageError,
    check_received,
)
from ..contracts.worker import WorkerEnd, WorkerInfo
from .consumer import StreamConsumer
from .producer import StreamProducer, iterator_of

__all__ = ["Streams"]

MAX_STREAMS_FACTOR = 2
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
        self._max_produced = MAX_STREAMS_FACTOR * max(flow.max_in_flight, flow.max_received)

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
        """Requests a stream from a worker and returns its consumer, without waiting; see `rpc_stream`.

        Raises:
            SerializationError: the call does not pickle; nothing was sent.
        """
        consumer = StreamConsumer(self.agent, worker, window_items, window_bytes, self._remove_consumer)

        def fill_header(envelope: agent_pb2.Envelope) -> None:
            consumer.fill_header(envelope)
            self._consumers[consumer.id] = consumer

        try:
            answer = self.agent.request(
                worker, Request(MessageType.STREAM_OPEN, call, timeout=0, label=CALL_PARTS, header=fill_header)
            )
        except BaseException:
            self._remove_consumer(consumer)
            raise
        consumer.set_answer(answer)
        return consumer

    def _remove_consumer(self, consumer: StreamConsumer) -> None:
        self._consumers.pop(consumer.id, None)

    def _on_item(self, message: Incoming) -> None:
        if (consumer := self._consumer_of(message)) is not None:
            consumer.on_item(message.envelope.stream.items, message.value, None, message.nbytes)

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Replaces an item that cannot be decoded by the error."""
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
                    f"{MAX_STREAMS_FACTOR} * max_in_flight={self._max_produced}",
                )

    def _on_credit(self, message: Incoming) -> None:
        if (producer := self._producer_of(message)) is not None:
            producer.on_credit(message.envelope.stream.items, message.envelope.stream.nbytes)

    def _producer_of(self, message: Incoming) -> StreamProducer | None:
        return self._producers.get((message.source.wire_id, message.envelope.stream.stream_id))

    # Both.

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Ends the streams from and to a lost worker."""
        self._end_streams(worker, end.as_error(worker.name), end.reason)

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Ends the streams from and to a suspect worker, of which items may be lost."""
        error = WorkerSuspectError(worker.name, reason)
        error.outcome = Outcome.UNKNOWN
        self._end_streams(worker, error, reason)

    def _end_streams(self, worker: WorkerInfo, error: Exception, reason: str) -> None:
        for consumer in list(self._consumers.values()):
            if consumer.producer == worker:
                consumer.fail(error)
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
