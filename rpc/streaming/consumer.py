"""The consuming end of a stream: puts items into their order, and sends credit for those that have been taken."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, final

from ...errors import Outcome, RpcError, SendFailedError, WorkerLostError, WorkerSuspectError
from ...proto.v1 import agent_pb2
from ..contracts.agent import CANCELLED, RpcAgent
from ..contracts.messages import MessageType
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly
from ..execution.futures import Future, copy_error, error_of

__all__ = ["ItemNotReadyError", "StreamConsumer"]

CREDITS_PER_WINDOW = 4
"""Credit is sent when this fraction of a window (one in so many) has been taken, so that small items share a
message. What has been taken without credit is always less than a window, so the producer never waits for credit
in vain."""


class ItemNotReadyError(Exception):
    """The next item of a stream has not arrived."""


class _Item(NamedTuple):
    value: Any
    error: Exception | None
    """The error of an item that cannot be decoded; raised in its place."""
    nbytes: int


@final
class StreamConsumer:
    """The items of one stream that have arrived and have not been taken. Safe to use from any thread."""

    def __init__(
        self,
        agent: RpcAgent,
        producer: WorkerInfo,
        window_items: int,
        window_bytes: int,
        on_closed: "Callable[[StreamConsumer], None]",
    ) -> None:
        """Makes the consumer of a stream that has not been requested yet.

        The producer pauses at so many items or bytes that have been sent and not taken. `on_closed` is called with
        this consumer, maybe more than once, when it accepts no more items.
        """
        self.id = 0
        """The id of the STREAM_OPEN request, once it has one."""
        self.producer = producer
        self.is_done = False
        """Whether the last item has been taken, or the stream has been closed."""
        self.buffered_bytes = 0
        """Bytes of the items that wait to be taken."""
        self._agent = agent
        self._on_closed = on_closed
        self._changed = threading.Condition()
        self._window = agent_pb2.StreamHeader(items=window_items, nbytes=window_bytes)
        self._wakers: set[Callable[[], None]] = set()
        self._answer: Future[Any] | None = None
        self._buffer: dict[int, _Item] = {}
        """The items that wait to be taken, by index."""
        self._taken_items = 0
        self._taken_bytes = 0
        self._credit = agent_pb2.StreamHeader()
        """The running totals that the producer has been sent last."""
        self._item_count: int | None = None
        """The number of items of the stream; None until it is known."""
        self._error: Exception | None = None
        """The error that is raised after the last item; None to end the iteration."""
        self._is_broken = False
        """Whether the stream ends after the items that have arrived, because no others will."""

    def fill_header(self, envelope: agent_pb2.Envelope) -> None:
        """Takes the id of the STREAM_OPEN request, and puts the window into its header."""
        self.id = envelope.id
        envelope.stream.CopyFrom(self._window)

    def set_answer(self, answer: Future[Any]) -> None:
        """Sets the future of the answer to STREAM_OPEN, which arrives when the stream ends."""
        self._answer = answer
        answer.add_done_callback(lambda _: self._on_answer(answer))

    # From the producer.

    def on_item(self, index: int, value: Any, error: Exception | None, nbytes: int) -> None:
        """Buffers an item, or the error that is raised in its place. Ignores duplicates.

        The stream ends if the producer sends more than the window.
        """
        with self._changed:
            if self.is_done or index < self._taken_items or index in self._buffer:
                return
            self._buffer[index] = _Item(value, error, nbytes)
            self.buffered_bytes += nbytes
            if self._exceeds_window(index):
                self.buffered_bytes -= self._buffer.pop(index).nbytes
                self._break(RpcError(f"worker {self.producer.name!r} sends more items than it was permitted to"))
                return
            self._notify()

    def _on_answer(self, answer: Future[Any]) -> None:
        """Notes how the stream ends: after how many items, and with which error."""
        error = error_of(answer)
        count: int | None = None
        if error is None:
            match answer.value():
                case (int(number), bytes(failure)):
                    count = number
                    error = self._agent.decode_failure(self.producer, failure) if failure else None
                case _:
                    error = RpcError(f"worker {self.producer.name!r} ends the stream with a malformed answer")
        with self._changed:
            if self._is_broken and count is not None:
                return  # an item was refused, which the end does not make good
            self._item_count, self._error, self._is_broken = count, error, count is None
            self._notify()

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error after the items that have arrived, unless all of them have."""
        with self._changed:
            if self._item_count is None or self._taken_items + len(self._buffer) < self._item_count:
                self._break(error)

    def leave_to_parent(self, error: Exception) -> None:
        """In a forked child, has whoever takes the next item raise an error; the parent takes the items."""
        self._changed = threading.Condition()
        self._wakers.clear()
        self._buffer = {}
        self.buffered_bytes = 0
        self._item_count, self._error, self._is_broken = None, error, True

    def _exceeds_window(self, index: int) -> bool:
        """Returns whether the producer cannot have sent an item that has arrived. Called with the lock."""
        if index - self._taken_items >= self._window.items:
            return True
        if self.buffered_bytes < self._window.nbytes:
            return False
        last = max(self._buffer)  # it was sent while those before it were less than the window
        return self.buffered_bytes - self._buffer[last].nbytes >= self._window.nbytes

    def _break(self, error: Exception) -> None:
        """Ends the stream with an error after the items that have arrived. Called with the lock."""
        self._error, self._is_broken = error, True
        self._notify()

    # To the program.

    def take(self) -> Any:
        """Returns the next item.

        Raises:
            ItemNotReadyError: the item has not arrived.
            StopIteration: the stream has ended.
            Exception: what ended the stream, after its last item.
        """
        with self._changed:
            if self.is_done:
                raise StopIteration
            if self._taken_items in self._buffer:
                item = self._pop_next()
                # Without credit the producer stops, so a stream whose credit cannot be sent is over.
                error = item.error if item.error is not None else self._send_credit()
                if error is None:
                    return item.value
            elif self.is_ready():
                error = self._error
            else:
                raise ItemNotReadyError
            dropped = self._mark_done()
        del dropped
        self._end()
        raise _end_of_iteration(error)

    def _pop_next(self) -> _Item:
        """Takes the next item, which must be there, out of the buffer. Called with the lock."""
        item = self._buffer.pop(self._taken_items)
        self._taken_items += 1
        self._taken_bytes += item.nbytes
        self.buffered_bytes -= item.nbytes
        return item

    def wait(self, seconds: float | None) -> bool:
        """Waits until `take` does not raise ItemNotReadyError. Returns False after `seconds`; None is no limit."""
        with self._changed:
            return wait_interruptibly(self._changed.wait_for, self.is_ready, seconds)

    def is_ready(self) -> bool:
        """Returns whether `take` has an item or the end of the stream to tell."""
        is_at_end = self._item_count is not None and self._taken_items >= self._item_count
        return self.is_done or self._taken_items in self._buffer or is_at_end or self._is_broken

    def add_waker(self, waker: Callable[[], None]) -> bool:
        """Registers a callback that is called once, when `is_ready` becomes true.

        Returns False, without a call, if it is true now.
        """
        with self._changed:
            if self.is_ready():
                return False
            self._wakers.add(waker)
            return True

    def remove_waker(self, waker: Callable[[], None]) -> None:
        """Removes a callback that `add_waker` registered."""
        with self._changed:
            self._wakers.discard(waker)

    def close(self) -> None:
        """Accepts no more items, and has the producer close its generator. Does not wait for that."""
        with self._changed:
            dropped = self._mark_done()
        del dropped
        self._end()

    def _mark_done(self) -> dict[int, _Item]:
        """Marks the stream as done.

        Called with the lock; returns the items to drop without it, for their finalizers.
        """
        self.is_done = True
        dropped, self._buffer = self._buffer, {}
        self.buffered_bytes = 0
        self._notify()
        return dropped

    def _end(self) -> None:
        """Forgets the stream, and ends it at the producer. Called without the lock."""
        self._on_closed(self)
        if (answer := self._answer) is None:
            return
        was_cut_off = answer.done() and isinstance(error_of(answer), WorkerSuspectError)
        if was_cut_off or answer.cancel():
            # The message of `cancel` gets lost if the connection breaks now, which the producer may not notice.
            self._agent.control.send(self.producer, CANCELLED, (self.id,))

    def _send_credit(self) -> SendFailedError | None:
        """Tells the producer what has been taken, if it is time to. Returns why that failed."""
        if self._item_count is not None or not self._is_credit_due():
            return None
        self._credit = agent_pb2.StreamHeader(stream_id=self.id, items=self._taken_items, nbytes=self._taken_bytes)
        credit = self._credit
        try:
            with contextlib.suppress(WorkerLostError, WorkerSuspectError):  # with which the stream fails anyway
                self._agent.post(
                    self.producer,
                    MessageType.STREAM_CREDIT,
                    None,
                    header=lambda envelope: envelope.stream.CopyFrom(credit),
                )
        except SendFailedError as error:
            error.outcome = Outcome.RAN  # of the stream, not of the credit
            return error
        return None

    def _is_credit_due(self) -> bool:
        items, nbytes = self._taken_items - self._credit.items, self._taken_bytes - self._credit.nbytes
        return (
            items * CREDITS_PER_WINDOW >= self._window.items or nbytes * CREDITS_PER_WINDOW >= self._window.nbytes
        )

    def _notify(self) -> None:
        """Wakes the waiting threads and event loops if `is_ready`. Called with the lock."""
        if not self.is_ready():
            return
        self._changed.notify_all()
        for waker in self._wakers:
            waker()
        self._wakers.clear()


def _end_of_iteration(error: Exception | None) -> Exception:
    """Returns what to raise at the end of a stream that ended with this error, or without one."""
    if error is None:
        return StopIteration()
    if isinstance(error, StopIteration | StopAsyncIteration):  # would look like the end of the stream
        end: Exception = RuntimeError(f"the function to stream raised {type(error).__name__}")
        end.__cause__ = error
    else:
        end = copy_error(error)
        end.__cause__ = error.__cause__
    return end
