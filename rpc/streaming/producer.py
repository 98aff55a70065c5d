"""The producing end of a stream: a generator that runs while there is credit.

Nobody waits here. The generator is advanced on a thread of the executor until its consumer has been sent a
window's worth that it has not consumed; then the thread goes, and the message that brings the next credit
goes on with it. So the steps of one generator run one after another, on changing threads.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, final

from ...proto.v1 import agent_pb2
from ..contracts.agent import RpcAgent
from ..contracts.messages import Incoming, MessageType
from ..wire.failures import encode_failure

__all__ = ["StreamProducer", "items_of"]

USER_CODE_CALLERS = ("_next_item", "step")
"""See tracebacks.py."""

log = logging.getLogger(__name__)


def items_of(agent: RpcAgent, function: Callable[..., Any], result: Any) -> Iterator[Any]:
    """What a streaming function's result is iterated with.

    Raises:
        TypeError: the result is neither an iterator nor an asynchronous one.
    """
    if isinstance(result, Iterator):
        return result
    if isinstance(result, AsyncIterator):
        return _Stepped(agent, result)
    name = getattr(function, "__qualname__", repr(function))
    raise TypeError(
        f"{name} returned {type(result).__name__!r}, which cannot be streamed: rpc_stream needs a generator "
        "function, or one that returns an iterator, such as iter(...); for a single result use rpc_sync"
    )


@final
class StreamProducer:
    """One generator, and what its consumer has not consumed yet."""

    def __init__(self, agent: RpcAgent, opened: Incoming, items: Iterator[Any]) -> None:
        self.consumer = opened.source
        self.id = opened.envelope.id
        self.done: Future[tuple[int, bytes]] = Future()
        """How many items there were, and the failure that ended them if one did: the answer to STREAM_OPEN."""
        self._agent = agent
        self._opened = opened
        self._items = items
        self._window = opened.envelope.stream
        self._lock = threading.Lock()
        self._advancing = False
        self._closing = False
        self._sent_items = 0
        self._sent_bytes = 0
        self._consumed_items = 0
        self._consumed_bytes = 0

    @property
    def unconsumed_bytes(self) -> int:
        """Bytes that have been sent and that nobody is known to have consumed."""
        return max(0, self._sent_bytes - self._consumed_bytes)

    def credit(self, items: int, nbytes: int) -> None:
        """So much has been consumed altogether. Goes on with the generator."""
        with self._lock:
            # Messages overtake each other on the threads that handle them; the largest number is the latest. It
            # may be more than is counted as sent, if the last item has been consumed before its `post` is over.
            self._consumed_items = max(self._consumed_items, items)
            self._consumed_bytes = max(self._consumed_bytes, nbytes)
        self.advance()

    def close(self) -> None:
        """Closes the generator: now, or if it is being advanced, when it has yielded."""
        with self._lock:
            self._closing = True
        self.advance()

    def advance(self) -> None:
        """Runs the generator until there is no credit, or no more item. Does nothing if another thread does."""
        while self._begin():
            with self._agent.serving(self._opened):
                failure = b"" if self._closing else self._step()
                if failure is not None:
                    self._close_items()
            if failure is not None:
                self.done.set_result((self._sent_items, failure))
            with self._lock:
                self._advancing = False

    def _begin(self) -> bool:
        with self._lock:
            full = (
                self._sent_bytes - self._consumed_bytes >= self._window.nbytes
                or self._sent_items - self._consumed_items >= self._window.items
            )
            if self._advancing or self.done.done() or (full and not self._closing):
                return False
            self._advancing = True
            return True

    def _next_item(self) -> Any:
        return next(self._items)

    def _step(self) -> bytes | None:
        """Sends one item. If there is none any more, the failure that ended them, empty if none did."""
        try:
            item = self._next_item()
            nbytes = self._agent.post(
                self.consumer,
                MessageType.STREAM_ITEM,
                item,
                what="the item",
                header=self._head,
                reply_to=self._opened,
            )
        except StopIteration:
            return b""
        except BaseException as error:
            return encode_failure(error)
        with self._lock:
            self._sent_items += 1
            self._sent_bytes += nbytes
        return None

    def _head(self, envelope: agent_pb2.Envelope) -> None:
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
class _Stepped:
    """An asynchronous iterator as an ordinary one. Its event loop runs only while it is advanced."""

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
