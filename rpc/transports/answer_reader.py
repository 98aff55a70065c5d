"""Reads the answer to a call on the thread that waits for it, instead of having another thread wake it.

A signal handler that raises, as that of Ctrl-C, may interrupt the main thread between any two steps of Python, but
not within one call of a C function. So whatever is read or taken is noted by the same call. What an interrupted
thread leaves is handled by a thread of the executor, from the beginning: completing a future twice does nothing.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple, Protocol, final

from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..execution.futures import Future
from ..execution.poller import OnReady, Poller
from ..execution.waiter import SocketWaiter

__all__ = ["Answer", "AnswerReader", "AnswerSource", "Completion"]

Completion = Callable[[agent_pb2.Envelope, Future[Any]], "Callable[[], None] | None"]
"""Returns what completes a future with an envelope: see TransportListener.completion."""


class Answer(NamedTuple):
    """An answer among what a socket has received."""

    complete: Callable[[], None]
    """Completes the future."""
    redo: Callable[[], bool]
    """Does it on a thread of the executor, also if `complete` has been begun; returns False."""
    left: list[Any]
    """What else has been received: one chunk, or none."""


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

    def can_be_read(self) -> bool:
        """Returns whether what is read now begins with a new frame. Called with the lock."""

    def find_answer(self, future: Future[Any]) -> "Answer | None":
        """Looks for the answer that a future stands for among what has been received. Raises DecodeError."""


@final
class AnswerReader:
    """Reads one answer from a socket. Made for each wait of a thread."""

    __slots__ = ("_answer", "_future", "_source", "_to_redo", "_waiter")

    def __init__(self, source: AnswerSource, future: Future[Any], waiter: SocketWaiter) -> None:
        """Reads nothing yet.

        Args:
            source: the socket.
            future: the one that the calling thread waits for.
            waiter: the calling thread's; released when another thread completes the future.
        """
        self._source = source
        self._future = future
        self._waiter = waiter
        self._answer: Answer | None = None
        self._to_redo: list[tuple[int, OnReady]] = []
        """The answer, from when it is taken out of what has been received until the future is done."""

    def read(self) -> None:
        """Reads until the answer has arrived, or something else, which the executor handles."""
        source = self._source
        try:
            source.poller.read_here(
                source.descriptor, source.reading, source.can_be_read, self._receive, source.received
            )
            if self._answer is not None:
                self._answer.complete()
                self._to_redo.clear()
        finally:
            if self._to_redo:  # interrupted; only C functions from here on
                try:
                    source.poller.handed_over.extend(self._to_redo)
                finally:
                    source.poller.wake()

    def _receive(self) -> None:
        source = self._source
        if self._future.is_completing or not self._waiter.wait(source.descriptor):
            return
        try:
            source.received.extend(starmap(source.receive, source.receive_args))
            answer = source.find_answer(self._future)
        except (BlockingIOError, ConnectionError, DecodeError):
            return
        if answer is not None:
            self._answer = answer
            self._to_redo.append((-1, answer.redo))
            source.received[:] = answer.left  # no step in between: an interrupted thread would leave both
