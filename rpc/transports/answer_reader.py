"""Reads the answer to a call on the thread that waits for it, instead of having another thread wake it.

A signal handler that raises, as that of Ctrl-C, may interrupt the main thread between any two steps of Python, but
not within one call of a C function. So one such call both reads bytes and keeps them in `received`, and one both
takes the answer out of `received` and keeps it here. If the thread is interrupted, one of the executor goes on: it
handles all of `received` if the answer is still in there, and else completes that answer. So exactly one thread
handles each answer, and only that one leases its segments of shared memory (see AnswerLeases). What follows an
answer is read into memory that becomes that of its tensors, and noted in the same way (see AnswerRest).
"""

from collections.abc import Callable, Sequence
from itertools import compress, starmap
from operator import call
from typing import Any, NamedTuple, Protocol, final

from google.protobuf.message import DecodeError

from ..execution.futures import Future
from ..execution.poller import Poller, SharedDescriptor
from ..execution.waiter import SocketWaiter
from .tls_socket import TlsSocket

__all__ = ["MAX_LOOKED_AT", "Answer", "AnswerReader", "AnswerRest", "AnswerSource", "Completion", "FindCompletion"]

MAX_LOOKED_AT = 8
"""Frames among which a thread looks for the answer that it waits for; more of them are left to the executor."""


class Completion(NamedTuple):
    """What completes a future with the answer to its request."""

    complete: Callable[[], None]
    """Completes it on the calling thread."""
    complete_again: Callable[[], None]
    """Has a thread of the executor do it, if a signal has interrupted `complete`. Does not block."""


FindCompletion = Callable[..., Completion | None]
"""Returns what completes a future with an envelope: see TransportListener.completion."""


class Answer(NamedTuple):
    """An answer among what a socket has received."""

    completion: Completion
    taking: list[tuple[Any, ...]]
    """The C functions that take it out of what has been received, each with its arguments. They return None."""


@final
class AnswerRest:
    """What follows an answer, while the thread that waits for it reads that."""

    __slots__ = ("_begun", "_memory", "counts", "find")

    def __init__(self, memory: memoryview, begun: int, find: Callable[[], Answer | None]) -> None:
        """Nothing has been read yet.

        Args:
            memory: for all of it.
            begun: the bytes that are there.
            find: returns the answer when all is there; None if another thread is to handle it.
        """
        self._memory = memory
        self._begun = begun
        self.find = find
        self.counts: list[int] = []
        """The bytes that each call has read."""

    @property
    def missing(self) -> memoryview:
        """The memory of what has not been read."""
        return self._memory[self._begun + sum(self.counts) :]

    def take(self) -> bytes:
        """Returns what has been read, for another thread to go on with."""
        return bytes(self._memory[self._begun : self._begun + sum(self.counts)])


class AnswerSource(SharedDescriptor, Protocol):
    """A socket that answers arrive by."""

    poller: Poller
    receive: Callable[..., Any]
    """The C function that reads a chunk."""
    receive_args: Sequence[tuple[Any, ...]]
    """Its arguments, in a sequence of one."""
    tls: TlsSocket | None
    """The socket if it has TLS: then this object's `receive` is used in place of the one above."""

    receive_into: Callable[[memoryview], int]
    """The C function that reads into memory."""
    has_heard: bool
    """Whether something has come since this was set to False."""

    def find_answer(self, future: Future[Any]) -> Answer | AnswerRest | None:
        """Looks for the answer that a future stands for among what has been received. Raises DecodeError.

        Returns:
            What is to be read of it first, if that is not all there.
        """


@final
class AnswerReader:
    """Reads one answer from a socket. Made for each wait of a thread."""

    __slots__ = ("_completion", "_future", "_source", "_waiter")

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
        self._completion: Completion | None = None
        """Of the answer, from when it is taken out of what has been received until the future is done."""

    def read(self) -> None:
        """Waits for the next bytes, and completes the future if its answer is among them."""
        poller = self._source.poller
        try:
            poller.read_here(self._source, self._receive)
            if self._completion is not None:
                self._completion.complete()
                self._completion = None
        finally:
            if self._completion is not None:  # interrupted; only C functions from here on
                try:
                    poller.handed_over.append((-1, self._completion.complete_again))
                finally:
                    poller.wake()

    def _receive(self, held: list[bool]) -> None:
        """Waits for bytes and reads them. `held` is [True] while this thread may read: see Poller.read_here."""
        source = self._source
        while not self._future.is_completing:
            if self._waiter.wait(source.descriptor):
                break  # else it was released, perhaps for an earlier future that the thread did not wait for
        else:
            return
        chunks = starmap(source.receive, source.receive_args)
        try:
            if source.tls is not None:
                source.tls.receive(source.received, held)
            elif held == [True]:
                source.received.extend(chunks)
            answer = source.find_answer(self._future)
            if isinstance(answer, AnswerRest):
                # One C function looks whether this thread may still read, and has another one know of the rest.
                source.received.extend(compress((answer,), held))
                answer = answer.find() if self._has_read(answer, held) else None
        except DecodeError:
            return
        except OSError as error:
            if error.errno is None:  # raised by the handler of a signal
                raise
            return
        if answer is None:
            return
        taking = starmap(call, [(setattr, self, "_completion", answer.completion), *answer.taking])
        if held == [True]:
            any(taking)  # a C function: a signal comes before all of it, or after

    def _has_read(self, rest: AnswerRest, held: list[bool]) -> bool:
        """Reads what follows an answer; returns False if another thread is to go on with it."""
        source = self._source
        while held == [True] and not self._future.is_completing:
            if not (missing := rest.missing):
                return True
            if not self._waiter.wait(source.descriptor):
                continue
            count = len(rest.counts)
            try:
                # One C function looks whether this thread may still read, reads, and notes how much.
                rest.counts.extend(map(source.receive_into, compress((missing,), held)))
            except BlockingIOError:
                continue
            if rest.counts[count:] in ([], [0]):
                return False
            source.has_heard = True
        return False
