"""Control messages: messages between agents that must not get lost, such as those that count references.

control_stream.py has the protocol. Those that are not urgent wait for other messages to the worker, which take
them along; so does what a worker says of those that it has processed. The control thread sends an envelope for
those that have waited for LINGER_S (execution/scheduler.py), and for urgent ones at once.
"""

import logging
import time
from collections.abc import Collection
from functools import partial
from typing import Any, final

from ...errors import LimitReachedError, RpcError, SerializationError, WorkerLostError
from ...net.security import printable
from ...proto.v1 import agent_pb2
from ..contracts.control import ControlHandler, ControlValues, OnSettled
from ..contracts.messages import CONTROL
from ..contracts.watcher import WorkerWatcher
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.kept_errors import printable_text
from ..execution.scheduler import Scheduler, Task
from ..wire.failures import decode_failure, encode_failure
from .control_stream import ControlStream, Settled, Unacknowledged
from .peers import Peers

__all__ = ["ControlStreams"]

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

_NUMBERS = {int}

log = logging.getLogger(__name__)


@final
class ControlStreams(WorkerWatcher):
    """The control messages of one agent: see `ControlMessages`."""

    def __init__(
        self, peers: Peers, values: ControlValues, scheduler: Scheduler, *, takes_along: bool = True
    ) -> None:
        """Sends nothing yet.

        The scheduler runs tasks on the control thread. Unless `takes_along`, messages do not travel in the
        envelopes of others.
        """
        self._peers = peers
        self._values = values
        self._scheduler = scheduler
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
        return sum(len(peer.control) for peer in self._peers.all() if peer.is_used)

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
        stream = self._peers.by_id[worker.wire_id].control
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
        is_of_numbers = type(payload) is tuple and set(map(type, payload)) == _NUMBERS
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
        peer = self._peers.by_id[stream.worker.wire_id]
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

    def _settle_each(self, stream: ControlStream, settled: list[Settled]) -> None:
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
        stream = self._peers.of(worker).control
        stream.send_again()
        self._scheduler.submit(partial(self._flush, stream))

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Settles what a lost worker has not acknowledged, with an error."""
        stream, error = self._peers.of(worker).control, end.as_error(worker.name)
        self._scheduler.submit(partial(self._settle_all, stream, error))
