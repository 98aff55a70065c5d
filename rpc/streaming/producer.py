"""The producing end of a stream: a generator that runs while there is credit.

No thread waits for credit. A thread of the executor advances the generator until a window of items has been sent
that the consumer has not taken, and is then free; the message that brings the next credit continues on its own
thread. So the steps of one generator run one after another, on changing threads.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, final

from ...proto.v1 import agent_pb2
from ..contracts.agent import RpcAgent
from ..contracts.messages import Incoming, MessageType

__all__ = ["StreamProducer", "iterator_of"]

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
        self.done: Future[tuple[int, bytes]] = Future()
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
