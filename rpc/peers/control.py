"""Control messages: messages between agents that must not get lost, such as those that count references.

From each worker to each other one there is a sequence of them. They are numbered, and taken along by whatever
envelope goes to the worker. The receiver processes them in the order of their numbers, each once, and says with
the next envelope of its own how far it is. What it has not acknowledged is sent again when an envelope was not
sent, or was taken back, and when a connection has broken; nothing else loses envelopes, so there are no timers.

What is not urgent waits for other messages to the worker, and so does what a worker says of those that it has
processed. The control thread sends an envelope for what has waited for LINGER_S (execution/timers.py), and for
urgent messages at once.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

from ...errors import LimitReachedError, RpcError, SerializationError, WorkerLostError
from ...net.security import printable
from ...proto.v1 import agent_pb2
from ..contracts.agent import ControlHandler, ControlValues, OnSettled
from ..contracts.messages import CONTROL
from ..contracts.worker import WorkerEnd, WorkerInfo, WorkerWatcher
from ..execution.futures import printable_text
from ..execution.timers import Scheduler, Task
from ..wire.failures import decode_failure, encode_failure
from .link import Absence

__all__ = ["ControlPeer", "ControlStream", "ControlStreams", "Unacknowledged"]

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

ATTACH_AFTER_S = 0.0005
"""Seconds that control messages wait for others of their kind, before another message takes them along. A header
costs more than a message in it, so not each call should have one; but a call that brings those of 4 ms takes
0.5 ms longer than others."""

MAX_FAILURE_BYTES = 8 << 10
"""Bytes of the error of a handler that is told."""

MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of a message. It travels with the envelopes, and delays those behind it."""

CLOSE_TIMEOUT_S = 5.0
"""Seconds that the control thread may take to end."""

RETRY_S = 0.02
"""Seconds until something is sent again of which an envelope could not be sent, although its receiver answers."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Unacknowledged:
    """A message that is not acknowledged."""

    message: agent_pb2.ControlMessage
    nbytes: int
    done: OnSettled | None
    """Is told of its end. None if nobody waits for that."""
    expected: tuple[type[Exception], ...]
    """Errors with which the receiver may answer on purpose."""


_Run = Callable[[agent_pb2.ControlMessage], bytes | None]
"""Runs the handler of a message; returns the encoded error that it has raised, if any. Does not raise."""

_Settled = tuple[Unacknowledged, bytes]
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

    def acknowledge(self, header: agent_pb2.ControlHeader) -> list[_Settled]:
        """Takes what an envelope of the peer says of the messages of this worker.

        Returns those that it has processed since, except those of which nobody is to be told.
        """
        settled: list[_Settled] = []
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

    def process(self, run: _Run, kinds: Collection[str] | None = None) -> None:
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


class ControlPeer(Protocol):
    """A peer, as control messages use it."""

    absence: Absence | None
    control: ControlStream

    @property
    def is_used(self) -> bool:
        """Whether there has been anything to do with it."""

    def send(self, envelope: bytes) -> object:
        """Queues an envelope; raises what keeps it from being sent."""


@final
class ControlStreams(WorkerWatcher):
    """The control messages of one agent: see `ControlMessages`."""

    def __init__(
        self,
        peers: Mapping[int, ControlPeer],
        values: ControlValues,
        scheduler: Scheduler,
        *,
        takes_along: bool = True,
    ) -> None:
        """Sends nothing yet. The peers are by wire id; others join them.

        The scheduler runs tasks on the control thread. Unless `takes_along`, messages do not travel in the
        envelopes of others.
        """
        self._peers, self._values, self._scheduler = peers, values, scheduler
        self._takes_along = takes_along
        self._handlers: dict[str, ControlHandler] = {}
        """By kind of message."""
        self._quick_kinds: set[str] = set()

    def on(self, kind: str, handle: ControlHandler, *, is_quick: bool = False) -> None:
        """Registers what a kind of message does: see `ControlMessages.on`."""
        self._handlers[kind] = handle
        if is_quick:
            self._quick_kinds.add(kind)

    def kinds(self) -> Collection[str]:
        """Returns the registered kinds."""
        return self._handlers.keys()

    def run(self, task: Task, *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before."""
        self._scheduler.submit(task, urgent=urgent)

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""
        return sum(len(peer.control) for peer in list(self._peers.values()) if peer.is_used)

    def close(self) -> None:
        """Ends the control thread; messages that are not acknowledged are dropped."""
        self._scheduler.close(CLOSE_TIMEOUT_S)

    # Sending.

    def send(
        self,
        worker: WorkerInfo,
        kind: str,
        payload: Any,
        done: OnSettled | None = None,
        expected: tuple[type[Exception], ...] = (),
        *,
        urgent: bool = True,
    ) -> None:
        """Sends a message: see `ControlMessages.send`."""
        stream = self._peers[worker.wire_id].control
        message = agent_pb2.ControlMessage(kind=kind)
        sent = Unacknowledged(message, 0, done, expected)
        try:
            sent.nbytes = self._put_payload(message, payload)
        except Exception as error:  # of a value that does not pickle
            self._scheduler.submit(partial(self._settle, stream, sent, error))
            return
        stream.append(sent)
        if urgent:
            self._scheduler.submit(partial(self._flush, stream))
        elif not stream.is_waiting:
            self._wait(stream)

    def _put_payload(self, message: agent_pb2.ControlMessage, payload: Any) -> int:
        """Puts a payload into a message; returns the bytes that it has then."""
        is_of_numbers = type(payload) is tuple and set(map(type, payload)) == {int}
        if is_of_numbers:
            try:
                message.numbers.extend(payload)
            except ValueError:  # out of range
                message.ClearField("numbers")
                is_of_numbers = False
        if not is_of_numbers:
            message.pickled = self._values.dumps(payload)
        if (nbytes := message.ByteSize()) > MAX_MESSAGE_BYTES:
            problem = f"control message {message.kind} has {nbytes} bytes, of {MAX_MESSAGE_BYTES} at most"
            raise SerializationError("the message", problem)
        return nbytes

    def _wait(self, stream: ControlStream) -> None:
        """Notes that something waits, and has the control thread send it if no envelope takes it along."""
        stream.since = time.monotonic()
        stream.is_waiting = True
        if not stream.is_flush_planned:
            stream.is_flush_planned = True
            self._scheduler.submit(partial(self._flush, stream), urgent=False)

    def _end_wait(self, stream: ControlStream) -> None:
        """Notes that nothing waits any more, unless there is something left, or new."""
        stream.is_waiting = False
        if stream.waits:
            self._wait(stream)

    def take_along(self, stream: ControlStream, envelope: agent_pb2.Envelope) -> None:
        """Puts what waits into an envelope to the peer that is about to be sent; called if something waits.

        If the envelope has a control header then, and is not sent, `send_again` has to be called.
        """
        if not self._takes_along or time.monotonic() < stream.since + ATTACH_AFTER_S:
            return
        if stream.take_along(envelope):
            self._end_wait(stream)

    def send_again(self, stream: ControlStream) -> None:
        """Has sent again what is not acknowledged: an envelope that has taken something along is lost."""
        stream.send_again()
        self._wait(stream)

    def _flush(self, stream: ControlStream) -> None:
        """Sends what waits. Runs on the control thread."""
        stream.is_flush_planned = False
        peer = self._peers[stream.worker.wire_id]
        while stream.waits:
            if (absence := peer.absence) is not None:
                if absence.is_lost:
                    self._settle_all(stream, absence.as_error(stream.worker.name))
                return  # if it is suspect, `on_worker_back` or `on_worker_lost` goes on
            envelope = agent_pb2.Envelope(type=CONTROL)
            if not stream.take_along(envelope, alone=True):
                break  # nothing waits any more
            try:
                peer.send(envelope.SerializeToString())
            except Exception as error:
                log.debug("control messages are not sent to %s: %s", stream.worker.name, error)
                stream.send_again()
                self._scheduler.call_later(RETRY_S, partial(self._flush, stream))
                return
        self._end_wait(stream)

    # Receiving.

    def receive(self, stream: ControlStream, envelope: agent_pb2.Envelope) -> bool:
        """Takes what an envelope of a peer has brought, and processes what is quick. Does not block.

        Returns whether there are other messages: `process` or `process_later` is to follow.
        """
        settled = stream.acknowledge(envelope.control)
        try:
            has_arrived = stream.receive(envelope.control)
        except LimitReachedError as error:
            self._values.record_refusal(stream.worker, error)
            has_arrived = stream.has_arrived
        if has_arrived:
            stream.process(partial(self._run, stream.worker), self._quick_kinds)
            has_arrived = stream.has_arrived
        if settled:
            self._scheduler.submit(partial(self._settle_each, stream, settled), urgent=False)
        if not stream.is_waiting and stream.waits:
            self._wait(stream)
        return has_arrived

    def process_later(self, stream: ControlStream) -> None:
        """Has the control thread process the messages of a peer that have arrived."""
        self._scheduler.submit(partial(self.process, stream), urgent=False)

    def process(self, stream: ControlStream) -> None:
        """Processes the messages of a peer that have arrived."""
        stream.process(partial(self._run, stream.worker))
        if not stream.is_waiting and stream.waits:
            self._wait(stream)

    def _run(self, source: WorkerInfo, message: agent_pb2.ControlMessage) -> bytes | None:
        """Runs the handler of a message. Returns the encoded error that it has raised, if any."""
        try:
            pickled = message.pickled
            payload = self._values.load(source, pickled) if pickled else tuple(message.numbers)
            self._handlers[message.kind](source, payload)
        except BaseException as error:  # SystemExit, too: the message may be part of one that has to be served
            problem = printable_text(error)
            log.info("control message %s of %s is refused: %s", printable(message.kind), source.name, problem)
            self._values.record_refusal(source, error)
            failure = encode_failure(error)
            if len(failure) > MAX_FAILURE_BYTES:
                failure = encode_failure(RpcError(f"{type(error).__name__}: {str(error)[:1000]}"))
            return failure
        return None

    # The ends of messages: on the control thread.

    def _settle_each(self, stream: ControlStream, settled: list[_Settled]) -> None:
        load = partial(self._values.load, stream.worker)
        for sent, failure in settled:
            error = decode_failure(failure, stream.worker.name, load) if failure else None
            self._settle(stream, sent, error)

    def _settle_all(self, stream: ControlStream, error: Exception) -> None:
        for sent in stream.settle_all():
            self._settle(stream, sent, error)
        self._end_wait(stream)

    def _settle(self, stream: ControlStream, sent: Unacknowledged, error: Exception | None) -> None:
        kind, name = sent.message.kind, stream.worker.name
        if error is not None and not isinstance(error, (WorkerLostError, *sent.expected)):
            log.warning("control message %s to %s failed: %s", kind, name, printable_text(error))
        if sent.done is not None:
            try:
                sent.done(error)
            except Exception:  # which must not keep others from being settled
                log.exception("the end of control message %s to %s cannot be handled", kind, name)

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Sends at once what was not acknowledged when the connection to a worker broke."""
        stream = self._peers[worker.wire_id].control
        stream.send_again()
        self._scheduler.submit(partial(self._flush, stream))

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Settles what a lost worker has not acknowledged, with an error."""
        stream, error = self._peers[worker.wire_id].control, end.as_error(worker.name)
        self._scheduler.submit(partial(self._settle_all, stream, error))
