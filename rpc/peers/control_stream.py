"""The control messages from this worker to one other, and from that one to this one: a sequence in each direction.

Messages are numbered, and taken along by whatever envelope goes to the worker. The receiver processes them in the
order of their numbers, each once, and says with the next envelope of its own how far it is. What it has not
acknowledged is sent again when an envelope was not sent, or was taken back, and when a connection has broken;
nothing else loses envelopes, so there are no timers.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from ...errors import LimitReachedError
from ...proto.v1 import agent_pb2
from ..contracts.control import OnSettled
from ..contracts.worker import WorkerInfo

__all__ = ["ControlStream", "Run", "Settled", "Unacknowledged"]

WINDOW = 1 << 14
"""Messages, from the first that is not acknowledged, that are sent to a worker, or accepted."""

MAX_ARRIVED_BYTES = 64 << 20
"""Bytes of the messages from a worker that wait to be processed; beyond it, more are refused."""

MAX_ALONE, MAX_ALONE_BYTES = 256, 64 << 10
MAX_ATTACHED, MAX_ATTACHED_BYTES = 64, 4 << 10
"""Messages and bytes, in an envelope of their own and in another one, at most. A message that is larger than this
has an envelope of its own."""

MAX_FAILURES = 8
"""Errors of handlers that an envelope tells of, at most: each may have some KiB."""

MAX_KEPT_FAILURES = 1 << 10
"""Errors that the peer does not know yet, at most. If there are more, nothing is processed until it does."""


@dataclass(slots=True)
class Unacknowledged:
    """A message that is not acknowledged."""

    message: agent_pb2.ControlMessage
    nbytes: int
    done: OnSettled | None
    """Is told of its end. None if nobody waits for that."""
    expected: tuple[type[Exception], ...]
    """Errors with which the receiver may answer on purpose."""


Run = Callable[[agent_pb2.ControlMessage], bytes | None]
"""Runs the handler of a message; returns the encoded error that it has raised, if any. Does not raise."""

Settled = tuple[Unacknowledged, bytes]
"""A message that is acknowledged, and the encoded error of its handler, if that has raised one."""


@final
class ControlStream:
    """The control messages to and from one peer. Safe to use from any thread.

    `append` takes no lock, so finalizers may call it.
    """

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.is_waiting = False
        """Whether something is to be sent. Who sends an envelope calls `ControlStreams.take_along` then."""
        self.is_flush_planned = False
        """Whether the control thread is going to send what waits."""
        self.since = 0.0
        """When the first of what waits began to, by `time.monotonic`."""
        self._lock = threading.Lock()
        """Held for what is short and runs no code of others."""
        self._processing = threading.Lock()
        """Held by the thread that processes messages. No thread waits for it."""
        # What is to be sent. The deque is appended to without the lock.
        self._unacknowledged: deque[Unacknowledged] = deque()
        self._first = 0
        """The number of the first of these."""
        self._next = 0
        """The number of the first that is to be sent now; those before are on their way."""
        self._sent_below = 0
        """The number below which all have been sent, maybe to be sent again."""
        # What has been received.
        self._arrived: deque[tuple[agent_pb2.ControlMessage, int]] = deque()
        """The messages that wait to be processed, and their bytes."""
        self._arrived_bytes = 0
        self._ahead: dict[int, tuple[agent_pb2.ControlMessage, int]] = {}
        """Messages that have arrived before others with smaller numbers."""
        self._expected = 0
        """The number of the message that is to arrive next."""
        self._processed = 0
        """The number of those that have been processed."""
        self._tellable = 0
        """The number of the first that the peer may not be told of yet: more have failed than it is told of at
        a time, and it does not know those before."""
        self._told = 0
        """What the peer was told last of that. Less than that if it is to be told again."""
        self._failures: dict[int, bytes] = {}
        """The encoded errors of handlers, by the number of the message, until the peer knows them."""

    def __len__(self) -> int:
        """Returns the number of messages that are not acknowledged."""
        return len(self._unacknowledged)

    # Sending.

    def append(self, sent: Unacknowledged) -> None:
        """Queues a message."""
        self._unacknowledged.append(sent)

    @property
    def waits(self) -> bool:
        """Whether there is something to be sent now."""
        if self._tellable > self._told:
            return True
        on_their_way = self._next - self._first
        return bool(self._unacknowledged) and on_their_way < WINDOW and len(self._unacknowledged) > on_their_way

    def take_along(self, envelope: agent_pb2.Envelope, *, alone: bool = False) -> bool:
        """Puts into an envelope what is to be sent now; returns whether there is something.

        If it is not sent then, `send_again` has to be called. An envelope that has something else, too, and is not
        `alone`, does not wait for another thread, and goes without.
        """
        count, nbytes = (MAX_ALONE, MAX_ALONE_BYTES) if alone else (MAX_ATTACHED, MAX_ATTACHED_BYTES)
        if not self._lock.acquire(blocking=alone):
            return False
        try:
            begin, end = self._next - self._first, min(len(self._unacknowledged), WINDOW)
            if begin >= end and self._tellable <= self._told:
                return False
            header = envelope.control
            header.first, header.acknowledged_below = self._next, self._first
            for index in range(begin, min(begin + count, end)):
                sent = self._unacknowledged[index]
                nbytes -= sent.nbytes
                if nbytes < 0 and not (alone and index == begin):
                    break
                header.messages.append(sent.message)
                self._next += 1
            self._sent_below = max(self._sent_below, self._next)
            if self._failures:
                for number, failure in itertools.islice(self._failures.items(), MAX_FAILURES):
                    header.failed.add(number=number, failure=failure)
            header.processed_below = self._tellable
            self._told = max(self._told, self._tellable)
            return True
        finally:
            self._lock.release()

    def send_again(self) -> None:
        """Has everything sent again that is not acknowledged: an envelope may be lost."""
        with self._lock:
            self._next = self._first
            self._tell_again()

    def _tell_again(self) -> None:
        self._told = min(self._told, self._tellable - 1)

    def _count_tellable(self) -> None:
        """Called with the lock when something is processed after a failure, or known to the peer."""
        failures = self._failures  # in the order of their numbers
        is_held = len(failures) > MAX_FAILURES
        self._tellable = next(itertools.islice(failures, MAX_FAILURES, None)) if is_held else self._processed

    def settle_all(self) -> list[Unacknowledged]:
        """Returns the messages to a peer that is lost, which never will be acknowledged, and forgets them."""
        with self._lock:
            left = list(self._unacknowledged.copy())
            for _ in left:
                self._unacknowledged.popleft()
            self._first += len(left)
            self._next, self._sent_below = self._first, self._first
            self._failures.clear()  # `process` goes on, and nobody is told
            self._told = self._tellable = self._processed
            return left

    # Receiving.

    def acknowledge(self, header: agent_pb2.ControlHeader) -> list[Settled]:
        """Takes what an envelope of the peer says of the messages of this worker.

        Returns those that it has processed since, except those of which nobody is to be told.
        """
        settled: list[Settled] = []
        failures = {each.number: each.failure for each in header.failed} if header.failed else {}
        with self._lock:
            if failures:
                self._tell_again()  # with `acknowledged_below`, so that the peer need not keep them
            below = header.processed_below
            while self._first < below and self._first < self._sent_below:
                sent = self._unacknowledged.popleft()
                if sent.done is not None or self._first in failures:
                    settled.append((sent, failures.get(self._first, b"")))
                self._first += 1
            self._next = max(self._next, self._first)
        return settled

    def receive(self, header: agent_pb2.ControlHeader) -> bool:
        """Takes the messages that an envelope of the peer has brought; returns whether any are to be processed.

        Raises LimitReachedError if the peer sends more than it may. What is too much is dropped.
        """
        with self._lock:
            if self._failures:
                for number in [each for each in self._failures if each < header.acknowledged_below]:
                    del self._failures[number]
                self._count_tellable()
            refused = None
            for number, message in enumerate(header.messages, header.first):
                if number < self._expected or number in self._ahead:
                    self._tell_again()  # it was sent again, so the peer does not know that it has arrived
                elif number < self._processed + WINDOW and self._arrived_bytes <= MAX_ARRIVED_BYTES:
                    nbytes = message.ByteSize()
                    self._ahead[number] = message, nbytes
                    self._arrived_bytes += nbytes
                else:
                    refused = number
                    break
            while self._expected in self._ahead:
                self._arrived.append(self._ahead.pop(self._expected))
                self._expected += 1
        if refused is not None:
            problem = f"control message {refused} is refused, as {self._processed} have been processed"
            raise LimitReachedError(problem, f"WINDOW={WINDOW}, MAX_ARRIVED_BYTES={MAX_ARRIVED_BYTES}")
        return bool(self._arrived) and len(self._failures) < MAX_KEPT_FAILURES

    @property
    def has_arrived(self) -> bool:
        """Whether there are messages to be processed."""
        return bool(self._arrived) and len(self._failures) < MAX_KEPT_FAILURES

    def process(self, run: Run, kinds: Collection[str] | None = None) -> None:
        """Processes the messages that have arrived, unless another thread does that: it takes these, too.

        If kinds are given, only those before the first one of another kind; then it is called again without them.
        """
        arrived = self._arrived
        while arrived and self._processing.acquire(blocking=False):
            try:
                while arrived and (not self._failures or len(self._failures) < MAX_KEPT_FAILURES):
                    if kinds is not None and arrived[0][0].kind not in kinds:
                        return
                    message, nbytes = arrived.popleft()
                    failure = run(message)
                    with self._lock:
                        self._arrived_bytes -= nbytes
                        if failure is not None:
                            self._failures[self._processed] = failure
                        self._processed += 1
                        if self._failures:
                            self._count_tellable()
                        else:
                            self._tellable = self._processed
                if arrived:
                    return  # until the peer knows of some failures
            finally:
                self._processing.release()
