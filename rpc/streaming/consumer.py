"""The consuming end of a stream: items in their order, and credit for those that have been taken."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, final

from ...errors import SendFailedError, WorkerLostError
from ...proto.v1 import agent_pb2
from ..contracts.agent import RpcAgent
from ..contracts.messages import MessageType
from ..contracts.worker import WorkerInfo
from ..execution.futures import Future, error_of
from ..execution.kept_errors import copy_error
from ..wire.failures import decode_failure

__all__ = ["CLOSE", "NothingYetError", "StreamConsumer"]

CLOSE = "stream.close"
"""The kind of control message that has a producer close its generator."""

CREDITS_PER_WINDOW = 4
"""Credit is told when this part of a window has been consumed, so that small items share one message. What
is consumed and not told is always less than a window, so the producer never waits for credit in vain."""


class NothingYetError(Exception):
    """The next item is not here."""


@final
class StreamConsumer:
    """What has come of one stream and has not been taken. Safe to use from any thread."""

    def __init__(
        self,
        agent: RpcAgent,
        producer: WorkerInfo,
        items: int,
        nbytes: int,
        closed: "Callable[[StreamConsumer], None]",
    ) -> None:
        """`closed` is told when nothing that comes is wanted any more."""
        self.id = 0
        self.producer = producer
        self.over = False
        """Has the last item been taken, or the stream been closed?"""
        self.buffered_bytes = 0
        self._agent = agent
        self._closed = closed
        self._changed = threading.Condition()
        self._window = agent_pb2.StreamHeader(items=items, nbytes=nbytes)
        self._wakers: set[Callable[[], None]] = set()
        self._answer: Future[Any] | None = None
        self._buffer: dict[int, tuple[Any, Exception | None, int]] = {}
        self._taken = 0
        self._taken_bytes = 0
        self._told = agent_pb2.StreamHeader()
        self._opened = False
        """Does the producer know the stream, so that it can be told to close it?"""
        self._count: int | None = None
        """How many items there are, once that is known."""
        self._error: Exception | None = None
        """What is raised after the last item."""
        self._broken = False
        """Is that after the last item that has come, because no others will?"""

    def head(self, envelope: agent_pb2.Envelope) -> None:
        """Takes the request's id, and tells the producer the window."""
        self.id = envelope.id
        envelope.stream.CopyFrom(self._window)

    def answered_by(self, answer: Future[Any]) -> None:
        """The future of the answer to STREAM_OPEN, which comes when the stream is over."""
        self._answer = answer
        answer.add_done_callback(lambda _: self._end(answer))

    # What comes from the producer.

    def opened(self) -> bool:
        """The producer knows the stream; False if it is not wanted any more."""
        with self._changed:
            self._opened = True
            return not self.over

    def put(self, index: int, value: Any, error: Exception | None, nbytes: int) -> None:
        """An item has come, or cannot be read."""
        with self._changed:
            if self.over or index < self._taken or index in self._buffer:
                return
            self._buffer[index] = (value, error, nbytes)
            self.buffered_bytes += nbytes
            self._tell()

    def _end(self, answer: Future[Any]) -> None:
        error, count = error_of(answer), None
        if error is None:
            count, failure = answer.value()
            error = decode_failure(failure, self.producer.name) if failure else None
        with self._changed:
            self._count, self._error, self._broken = count, error, count is None
            self._tell()

    def broken(self, error: Exception) -> None:
        """No further item will come."""
        with self._changed:
            if self._count is None or self._taken + len(self._buffer) < self._count:
                self._error, self._broken = error, True
                self._tell()

    # What the program takes.

    def take(self) -> Any:
        """The next item.

        Raises:
            NothingYetError: it has not come.
            StopIteration: there is none.
            Exception: what ended the stream, after its last item.
        """
        with self._changed:
            if self.over:
                raise StopIteration
            if self._taken in self._buffer:
                value, error, nbytes = self._buffer.pop(self._taken)
                self._taken += 1
                self._taken_bytes += nbytes
                self.buffered_bytes -= nbytes
                if error is None:
                    try:
                        self._tell_credit()
                    except SendFailedError as failure:
                        error = failure  # without credit the producer stops: the stream is over
                    else:
                        return value
            elif self.ready():
                error = self._error
            else:
                raise NothingYetError
            dropped = self._close()
        del dropped
        self._finish()
        if error is None:
            raise StopIteration
        if isinstance(error, StopIteration | StopAsyncIteration):  # which would pass for the end
            raise RuntimeError(f"the function to stream raised {type(error).__name__}") from error
        raise copy_error(error) from error.__cause__

    def wait(self, seconds: float | None) -> bool:
        """Waits until `take` has something to say; False if that takes more than `seconds`."""
        with self._changed:
            return self._changed.wait_for(self.ready, seconds)

    def ready(self) -> bool:
        """Has `take` something to say?"""
        at_end = self._count is not None and self._taken >= self._count
        return self.over or self._taken in self._buffer or at_end or self._broken

    def wake(self, waker: Callable[[], None]) -> bool:
        """Has `waker` called once, as soon as `take` may have something to say; False if it has already."""
        with self._changed:
            if self.ready():
                return False
            self._wakers.add(waker)
            return True

    def forget(self, waker: Callable[[], None]) -> None:
        """Does not call `waker` any more."""
        with self._changed:
            self._wakers.discard(waker)

    def close(self) -> None:
        """Takes no more items, and has the producer close its generator. Does not wait for it."""
        with self._changed:
            dropped = self._close()
        del dropped
        self._finish()

    def _close(self) -> dict[int, tuple[Any, Exception | None, int]]:
        """Returns the items that nobody took, to be let go without the lock."""
        self.over = True
        dropped, self._buffer = self._buffer, {}
        self.buffered_bytes = 0
        self._tell()
        return dropped

    def _finish(self) -> None:
        self._closed(self)
        # What the producer does not know yet it is told to close when it says that it does. This must not be lost.
        if self._answer is not None and self._answer.cancel() and self._opened:
            self._agent.control.send(self.producer, CLOSE, self.id)

    def _tell_credit(self) -> None:
        items, nbytes = self._taken - self._told.items, self._taken_bytes - self._told.nbytes
        due = (
            items * CREDITS_PER_WINDOW >= self._window.items or nbytes * CREDITS_PER_WINDOW >= self._window.nbytes
        )
        if not due or self._count is not None:
            return
        self._told = agent_pb2.StreamHeader(stream_id=self.id, items=self._taken, nbytes=self._taken_bytes)
        told = self._told
        with contextlib.suppress(WorkerLostError):
            self._agent.post(
                self.producer,
                MessageType.STREAM_CREDIT,
                None,
                header=lambda envelope: envelope.stream.CopyFrom(told),
            )

    def _tell(self) -> None:
        if not self.ready():
            return
        self._changed.notify_all()
        for waker in self._wakers:
            waker()
        self._wakers.clear()
