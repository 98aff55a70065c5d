"""Reads the answer to a call on the thread that waits for it, instead of having another thread wake it.

A signal handler that raises, as that of Ctrl-C, may interrupt the main thread between any two steps of Python, but
not within one call of a C function. So whatever is read or taken is noted by the same call. What an interrupted
thread leaves is handled by a thread of the executor, from the beginning: completing a future twice does nothing.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Protocol, final

from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..execution.futures import Future
from ..execution.poller import OnReady, Poller
from ..execution.waiter import SocketWaiter

__all__ = ["AnswerReader", "AnswerSource", "Completion"]

Completion = Callable[[agent_pb2.Envelope, Future[Any]], "Callable[[], None] | None"]
"""Returns what completes a future with an envelope: see TransportListener.completion."""


class AnswerSource(Protocol):
    """A socket that answers arrive by."""

    poller: Poller
    """Waits for the socket while no thread reads it."""
    descriptor: int
    reading: threading.Lock
    """Held by the thread that reads."""
    received: list[Any]
    """What has been read and not handled, at most one chunk."""
    receive: Callable[..., Any]
    """The C function that reads a chunk."""
    receive_args: Sequence[tuple[Any, ...]]
    """Its arguments, in a sequence of one."""
    completion: Completion

    def can_be_read(self) -> bool:
        """Returns whether what is read now begins with a new frame. Called with the lock."""

    def sole_envelope(self) -> agent_pb2.Envelope | None:
        """Returns the envelope in `received`, if nothing else is in it. Raises DecodeError."""

    def handle_again(self, chunk: Any) -> bool:
        """Handles a chunk whose sole envelope a thread has not handled to the end; returns False."""


@final
class AnswerReader:
    """Reads one answer from a socket. Made for each wait of a thread."""

    __slots__ = ("_complete", "_future", "_redo", "_source", "_taken", "_waiter")

    def __init__(self, source: "AnswerSource", future: Future[Any], waiter: SocketWaiter) -> None:
        """Reads nothing yet.

        Args:
            source: the socket.
            future: the one that the calling thread waits for.
            waiter: the calling thread's; released when another thread completes the future.
        """
        self._source = source
        self._future = future
        self._waiter = waiter
        self._taken: list[Any] = []
        """The answer, from when it is taken out of what the socket has read until the future is done."""
        self._complete: Callable[[], None] | None = None
        self._redo: tuple[int, OnReady]
        """What handles the answer if a signal interrupts this thread."""

    def read(self) -> None:
        """Reads until the answer has arrived, or something else, which the executor handles."""
        source = self._source
        try:
            source.poller.borrow(
                source.descriptor, source.reading, source.can_be_read, self._receive, source.received
            )
            if self._complete is not None:
                self._complete()
                self._taken.clear()
        finally:
            if self._taken:  # interrupted; only C functions from here on
                try:
                    source.poller.handed_over.append(self._redo)
                finally:
                    source.poller.wake()

    def _receive(self) -> None:
        source = self._source
        if self._future.is_completing or not self._waiter.wait(source.descriptor):
            return
        try:
            source.received.extend(starmap(source.receive, source.receive_args))
            envelope = source.sole_envelope()
        except (BlockingIOError, ConnectionError, DecodeError):
            return
        if envelope is not None:
            self._complete = source.completion(envelope, self._future)
            if self._complete is not None:
                self._redo = -1, partial(source.handle_again, source.received[0])
                self._taken.extend(map(source.received.pop, (0,)))
