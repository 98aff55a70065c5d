"""The two ends of a stream: a generator that runs while there is credit, and a buffer that puts items into order.

No thread waits for credit. A thread of the executor advances the generator until a window of items has been sent
that the consumer has not taken, and is then free; the message that brings the next credit continues on its own
thread. So the steps of one generator run one after another, on changing threads.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, NamedTuple, final

from ...errors import Outcome, RpcError, SendFailedError, WorkerLostError, WorkerSuspectError
from ...proto.v1 import agent_pb2
from ..contracts.agent import CANCELLED, RpcAgent
from ..contracts.messages import CALL_PARTS, Incoming, MessageType, Request
from ..contracts.worker import WorkerInfo
from ..execution.ctrl_c import wait_interruptibly
from ..execution.futures import Future, copy_error, error_of

__all__ = ["ItemNotReadyError", "StreamConsumer", "StreamProducer", "iterator_of"]

_CREDITS_PER_WINDOW = 4
"""Credit is sent when this fraction of a window (one in so many) has been taken, so that small items share a
message. What has been taken without credit is always less than a window, so the producer never waits for credit
in vain."""

USER_CODE_CALLERS = ("_next_item", "step")
"""The functions here that call users' code, for `rpc.wire.failures`."""

log = logging.getLogger(__name__)


def iterator_of(agent: RpcAgent, function: Callable[..., Any], result: Any) -> Iterator[Any]:
    """Returns an iterator over the items that a streamed function yields, from what it has returned.

    Raises TypeError if that is neither an iterator nor an asynchronous iterator.
    """
    if isinstance(result, Iterator):
        return result
    if isinstance(result, AsyncIterator):
        return _SteppedAsyncIterator(agent, result)
    if isinstance(result, Coroutine):
        result.close()  # else Python warns that nobody has awaited it
    name = getattr(function, "__qualname__", repr(function))
    raise TypeError(
        f"{name} returned {type(result).__name__!r}, which cannot be streamed: rpc_stream needs a generator "
        "function, or one that returns an iterator, such as iter(...); for a single result use rpc_sync"
    )


@final
class StreamProducer:
    """Runs one generator, as far ahead of its consumer as the window allows. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent, request: Incoming, items: Iterator[Any]) -> None:
        """Args: agent: the agent of this worker. request: STREAM_OPEN. items: the generator."""
        self.consumer = request.source
        self.id = request.envelope.id
        self.done: concurrent.futures.Future[tuple[int, bytes]] = concurrent.futures.Future()
        """The answer to STREAM_OPEN: how many items there were, and the encoded failure that ended them, if
        any."""
        self._agent = agent
        self._request = request
        self._items = items
        self._window = request.envelope.stream
        self._lock = threading.Lock()
        self._is_advancing = False
        self._is_closing = False
        self._cut_off = b""
        """The encoded error of the stream if its generator is closed, and its consumer has not asked for that."""
        self._is_postponed = False
        """Whether it waits until less is queued to be sent to the consumer, whatever the window says."""
        self._sent_items = 0
        self._sent_bytes = 0
        self._taken_items = 0
        self._taken_bytes = 0

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of the items that have been sent and that the consumer is not known to have taken."""
        return max(0, self._sent_bytes - self._taken_bytes)

    def on_credit(self, items: int, nbytes: int) -> None:
        """Continues the generator after the consumer has taken items: so many in all, and of so many bytes."""
        with self._lock:
            # Messages overtake each other on the threads that handle them; the largest number is the latest. It
            # may be more than is counted as sent, if the last item has been taken before its `post` returns.
            self._taken_items = max(self._taken_items, items)
            self._taken_bytes = max(self._taken_bytes, nbytes)
        self.advance()

    def close(self, error: Exception | None = None) -> None:
        """Closes the generator: now, or if another thread advances it, after its next item.

        The consumer gets the error, if it has not asked for the end, which it must not take for that of the items.
        """
        with self._lock:
            if error is not None and not self._is_closing:
                self._cut_off = self._agent.encode_failure(error)
            self._is_closing = True
        self.advance()

    def advance(self) -> None:
        """Runs the generator until there is no credit or it ends. Does nothing if another thread runs it."""
        while self._start_step():
            with self._agent.serving(self._request):
                failure = self._cut_off if self._is_closing else self._send_next_item()
                if failure is not None:
                    self._close_items()
            if failure is not None:
                self.done.set_result((self._sent_items, failure))
            with self._lock:
                self._is_advancing = False

    def _resume(self) -> None:
        """Continues when enough has been sent. Called on the event loop."""
        with self._lock:
            self._is_postponed = False
        self._agent.submit(self.advance)

    def _start_step(self) -> bool:
        """Returns whether this thread is to run the next step: no other does, and there is credit or an end."""
        with self._lock:
            is_window_full = (
                self._sent_bytes - self._taken_bytes >= self._window.nbytes
                or self._sent_items - self._taken_items >= self._window.items
            )
            if self._is_advancing or self.done.done():
                return False
            if not self._is_closing:
                if is_window_full or self._is_postponed:
                    return False
                if self._agent.postpone(self.consumer, self._resume):
                    self._is_postponed = True
                    return False
            self._is_advancing = True
            return True

    def _next_item(self) -> Any:
        return next(self._items)

    def _send_next_item(self) -> bytes | None:
        """Sends one item. At the end, returns the encoded failure; empty if there was none."""
        try:
            item = self._next_item()
            nbytes = self._agent.post(
                self.consumer,
                MessageType.STREAM_ITEM,
                item,
                label="the item",
                header=self._fill_header,
                reply_to=self._request,
            )
        except StopIteration:
            return b""
        except BaseException as error:
            failure = self._agent.encode_failure(error)
            self._request.failure = error.with_traceback(None)
            return failure
        with self._lock:
            self._sent_items += 1
            self._sent_bytes += nbytes
        return None

    def _fill_header(self, envelope: agent_pb2.Envelope) -> None:
        envelope.stream.stream_id = self.id
        envelope.stream.items = self._sent_items

    def _close_items(self) -> None:
        close = getattr(self._items, "close", None)
        if close is None:
            return
        try:
            close()
        except BaseException:
            log.exception("closing the generator streamed to worker %s failed", self.consumer.name)


@final
class _SteppedAsyncIterator:
    """Makes an asynchronous iterator an ordinary one, with an event loop that runs only during `next`."""

    def __init__(self, agent: RpcAgent, items: AsyncIterator[Any]) -> None:
        self._agent = agent
        self._items = items
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        async def step() -> Any:
            return await anext(self._items)

        try:
            with self._agent.blocking():
                return self._runner.run(step())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        async def end() -> None:
            if (close := getattr(self._items, "aclose", None)) is not None:
                await close()

        try:
            with self._agent.blocking():
                self._runner.run(end())
        finally:
            self._runner.close()


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
        consumers: "dict[int, StreamConsumer]",
    ) -> None:
        """Makes the consumer of a stream that has not been requested yet.

        The producer pauses at so many items or bytes that have been sent and not taken. The consumer is in the
        table of them, by its id, as long as it accepts items.
        """
        self.id = 0
        """The id of the STREAM_OPEN request, once it has one."""
        self.producer = producer
        self.is_done = False
        """Whether the last item has been taken, or the stream has been closed."""
        self.buffered_bytes = 0
        """Bytes of the items that wait to be taken."""
        self._agent = agent
        self._consumers = consumers
        self._changed = threading.Condition()
        self._window = agent_pb2.StreamHeader(items=window_items, nbytes=window_bytes)
        self._wakers: set[Callable[[], None]] = set()
        self._answer: Future[Any] | None = None
        """The answer to STREAM_OPEN, which arrives when the stream ends."""
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

    def open(self, call: tuple[Any, ...]) -> None:
        """Requests the stream, without waiting for it. Raises what `RpcAgent.request` does; nothing was sent."""
        request = Request(MessageType.STREAM_OPEN, call, timeout=0, label=CALL_PARTS, header=self._fill_header)
        try:
            answer = self._answer = self._agent.request(self.producer, request)
        except BaseException:
            self._consumers.pop(self.id, None)
            raise
        answer.add_done_callback(lambda _: self._on_answer(answer))

    def _fill_header(self, envelope: agent_pb2.Envelope) -> None:
        self.id = envelope.id
        envelope.stream.CopyFrom(self._window)
        self._consumers[self.id] = self

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
            elif self._is_ready():
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
            return wait_interruptibly(self._changed.wait_for, self._is_ready, seconds)

    def _is_ready(self) -> bool:
        """Returns whether `take` has an item or the end of the stream to tell."""
        is_at_end = self._item_count is not None and self._taken_items >= self._item_count
        return self.is_done or self._taken_items in self._buffer or is_at_end or self._is_broken

    def add_waker(self, waker: Callable[[], None]) -> bool:
        """Registers a callback that is called once, when `take` has something to tell.

        Returns False, without a call, if it is true now.
        """
        with self._changed:
            if self._is_ready():
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
        self._consumers.pop(self.id, None)
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
            items * _CREDITS_PER_WINDOW >= self._window.items
            or nbytes * _CREDITS_PER_WINDOW >= self._window.nbytes
        )

    def _notify(self) -> None:
        """Wakes the waiting threads and event loops if there is something to tell. Called with the lock."""
        if not self._is_ready():
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
