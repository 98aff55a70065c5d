"""Control messages: messages between agents that must not get lost, such as those that count references.

A control message is sent again until it is acknowledged, and processed once. Each sender numbers those it
sends to each receiver. The receiver keeps the outcome of those it has processed and answers a repetition
with it; every message says below which number everything is acknowledged, so outcomes are kept only while a
repetition can still come, and a later straggler is recognised by its number alone.

Control messages to one worker travel together. Those that are not urgent wait for other messages to the worker,
whatever they are, and are attached to them (attached_control.py); so are the acknowledgements of attached ones.
The control thread sends an envelope for those that have waited for LINGER_S (execution/scheduler.py). Urgent ones,
and those that have to be sent again, are the body of a request, whose answer acknowledges them.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, final

import torch

from ...errors import (
    AnswerFailedError,
    NotInitializedError,
    RpcTimeoutError,
    SendFailedError,
    WorkerLostError,
    WorkerSuspectError,
)
from ...proto.v1 import agent_pb2
from ..contracts.agent import RpcAgent, holder
from ..contracts.control import ControlHandler, OnSettled
from ..contracts.messages import CONTROL, Handler, Request
from ..contracts.worker import WorkerInfo
from ..execution.futures import error_of
from ..execution.kept_errors import printable_text
from ..execution.scheduler import Scheduler, SerialThread, Task
from .attached_control import AttachedControl, Dumps
from .control_inbox import ControlInbox, Loads, OnRefused
from .control_queue import Batch, ControlMessage, ControlQueue, do_nothing

__all__ = ["RetryingControlMessages"]

ATTEMPT_TIMEOUT_S = 5.0
"""Seconds that the first attempt waits for its acknowledgement. Each later one waits twice as long: the link may
be slow."""

MAX_DOUBLINGS = 3
"""How often the time for an attempt is doubled."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
"""Seconds between attempts: doubled from the first to the longest. An attempt that could not be sent ends at once,
any other when its time is up."""

ATTACH_AFTER_S = 0.004
"""Seconds that control messages wait for others of their kind, before they are attached to the next message: a
header costs more than the messages in it."""

RETRY_AFTER_S = 0.001
"""Seconds after which the control thread looks again if another thread is sending control messages to a worker."""

MAX_BATCH = 256
"""Messages that travel together, at most."""

log = logging.getLogger(__name__)


@final
class RetryingControlMessages:
    """Sends control messages until they are acknowledged, and processes each that arrives once.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def __init__(
        self, agent: RpcAgent, scheduler: Callable[[str, Task], Scheduler] = SerialThread, *, attaches: bool = True
    ) -> None:
        """Sends nothing yet.

        Args:
            agent: this worker's.
            scheduler: runs tasks on the control thread, given its name and a task to run first.
            attaches: whether messages may be attached to others.
        """
        self.waiting: dict[int, float] = {}
        """Since when something waits, by worker id. Who sends another message calls `attach` if anything does."""
        self._agent = agent
        self._attaches = attaches
        self._inbox = ControlInbox()
        self._queues: dict[int, ControlQueue] = {}
        """By worker id."""
        self._scheduler = scheduler(f"gradwire-control-{agent.info.name}", lambda: holder.bind_thread(agent))
        self._attached = AttachedControl(
            self._scheduler,
            lambda: ATTEMPT_TIMEOUT_S,
            self._attempt_all,
            self._settle,
            self._resume,
            with_messages=attaches,
        )

    def on(self, kind: str, handle: ControlHandler) -> None:
        """Registers what a kind of message does."""
        self._inbox.handlers[kind] = handle

    def kinds(self) -> Collection[str]:
        """Returns the registered kinds."""
        return self._inbox.handlers.keys()

    def send(
        self,
        worker: WorkerInfo,
        kind: str,
        payload: Any,
        done: OnSettled = do_nothing,
        expected: tuple[type[Exception], ...] = (),
        *,
        urgent: bool = True,
    ) -> None:
        """Sends a message, again and again until it is acknowledged: see `ControlMessages.send`."""
        sent = ControlMessage(kind, payload, done, expected, urgent)
        queue = self._queue(worker)
        if urgent:
            queue.urgent.append(sent)
            self._scheduler.submit(partial(self._flush, queue))
        else:
            queue.lingering.append(sent)
            if worker.wire_id not in self.waiting:
                self._linger(queue)

    def _queue(self, worker: WorkerInfo) -> ControlQueue:
        queue = self._queues.get(worker.wire_id)
        if queue is None:
            queue = self._queues.setdefault(worker.wire_id, ControlQueue(worker))
        return queue

    def run(self, task: Task, *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before."""
        self._scheduler.submit(task, urgent=urgent)

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""
        return sum(queue.pending() for queue in list(self._queues.values()))

    def handler(self, on_refused: OnRefused) -> Handler:
        """Returns the handler of CONTROL messages, which calls `on_refused` when that of a kind has raised."""
        self._inbox.on_refused = on_refused
        return Handler(self._inbox.process, description="a control message to worker", is_quick=True)

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Sends at once what was not acknowledged while a worker was suspect."""
        if (queue := self._queues.get(worker.wire_id)) is not None:
            self._scheduler.submit(partial(self._send_paused, queue))
            self._scheduler.submit(partial(self._attached.send_again, queue))

    def on_worker_lost(self, worker: WorkerInfo) -> None:
        """Settles what was attached to messages to a worker that is lost; requests settle themselves."""
        if (queue := self._queues.get(worker.wire_id)) is not None:
            self._scheduler.submit(partial(self._attached.send_again, queue))

    def close(self) -> None:
        """Ends the control thread; messages that are not acknowledged are dropped."""
        self._scheduler.close(ATTEMPT_TIMEOUT_S)

    # What is attached to other messages: on the threads that send and receive those.

    def attach(self, worker: WorkerInfo, envelope: agent_pb2.Envelope, dumps: Dumps) -> None:
        """Attaches what waits to a message that is about to be sent; called if something does.

        Args:
            worker: the receiver.
            envelope: the message's.
            dumps: pickles the payloads.
        """
        is_own = envelope.type == CONTROL
        since = self.waiting.get(worker.wire_id)
        if since is None or (is_own and envelope.id):
            return
        if not is_own and time.monotonic() < since + ATTACH_AFTER_S:
            return
        queue = self._queues[worker.wire_id]
        if not queue.sending.acquire(blocking=False):
            return
        try:
            self._attached.attach(queue, envelope.control, dumps)
        except Exception:  # which is not that of the other message
            log.exception("control messages cannot be attached to a message to %s", worker.name)
            queue.drop_outcomes()  # the worker asks for them again
            return
        finally:
            queue.sending.release()
        if queue.urgent:
            self._scheduler.submit(partial(self._flush, queue))
        self._end_wait(queue)

    def receive(
        self, source: WorkerInfo, envelope: agent_pb2.Envelope, loads: Loads, *, with_answer: bool = False
    ) -> None:
        """Takes what is attached to a message that has arrived, and processes the control messages.

        Args:
            source: the sender.
            envelope: the message's.
            loads: unpickles payloads of that worker.
            with_answer: whether the calling thread completes a request: then the control thread runs the handlers.
        """
        header = envelope.control
        if header.processed or header.failed:
            self._attached.settle(self._queue(source), header, self._agent.decode_failure)
        if not header.messages or (envelope.type == CONTROL and envelope.id):
            return
        if with_answer:
            self._scheduler.submit(partial(self._process, source, header, loads), urgent=False)
        else:
            self._process(source, header, loads)

    def _process(self, source: WorkerInfo, header: agent_pb2.ControlHeader, loads: Loads) -> None:
        queue = self._queue(source)
        outcomes = self._inbox.process_attached(source, header, loads)
        for number, failure in outcomes.items():
            if failure is None:
                queue.processed.append(number)
            else:
                queue.failed.append((number, failure))
        if outcomes and source.wire_id not in self.waiting:
            self._linger(queue)

    # Sending: on the control thread.

    def _linger(self, queue: ControlQueue) -> None:
        """Notes that something waits, and has the control thread send it if it is not attached to a message.

        As long as this is noted, the control thread is going to call `_flush`.
        """
        self.waiting[queue.worker.wire_id] = time.monotonic()
        self._scheduler.submit(partial(self._flush, queue), urgent=False)

    def _end_wait(self, queue: ControlQueue) -> None:
        """Notes that what has waited is sent."""
        self.waiting.pop(queue.worker.wire_id, None)
        # Left over, or queued in between by a thread that has seen others wait.
        if (queue.lingering and not queue.is_full) or queue.has_outcomes():
            self._linger(queue)

    def _flush(self, queue: ControlQueue) -> None:
        """Sends what is queued for a worker, and has not been attached to another message."""
        if not queue.urgent and self._send_attached(queue):
            queue.is_full = False  # what has waited for acknowledgements was attached
        elif not self._send_queued(queue):
            self._scheduler.call_later(RETRY_AFTER_S, partial(self._flush, queue))
            return
        self._attached.check_later(queue)

    def _send_attached(self, queue: ControlQueue) -> bool:
        """Sends what waits attached to an envelope of its own; returns whether nothing is left to be sent."""
        if queue.worker.wire_id not in self.waiting:
            return not queue.lingering
        if not (self._attaches or queue.has_outcomes()):
            return False
        try:
            self._agent.post(queue.worker, CONTROL, None)
        except Exception as error:  # which a request tells whoever has sent the messages
            log.debug("control messages are not sent to %s: %s", queue.worker.name, error)
            queue.drop_outcomes()  # the worker asks for them again
            self.waiting.pop(queue.worker.wire_id, None)
        return not queue.lingering and queue.worker.wire_id not in self.waiting

    def _send_queued(self, queue: ControlQueue) -> bool:
        """Sends what is queued for a worker as requests; returns False if another thread is at it."""
        if not queue.sending.acquire(blocking=False):
            return False
        try:
            is_sent = self._send_some(queue)
            while is_sent and (queue.lingering or queue.urgent):
                is_sent = self._send_some(queue)
        finally:
            queue.sending.release()
        self._end_wait(queue)
        return True

    def _send_some(self, queue: ControlQueue) -> bool:
        """Sends the messages that are queued first together; returns False if more must not be sent now."""
        lingering = list(itertools.islice(queue.lingering.copy(), MAX_BATCH))
        urgent = list(itertools.islice(queue.urgent.copy(), MAX_BATCH - len(lingering)))
        messages = [*lingering, *urgent]
        if not messages:
            return True
        while queue.exceeds_window(len(messages)):
            if queue.is_full:
                return False
            queue.is_full = True  # the thread that handles acknowledgements looks at it after them
        queue.is_full = False
        queue.number(messages)
        self._attempt(Batch(queue, messages))
        for _ in lingering:
            queue.lingering.popleft()
        for _ in urgent:
            queue.urgent.popleft()
        return True

    def _attempt_all(self, queue: ControlQueue, messages: list[ControlMessage]) -> None:
        for start in range(0, len(messages), MAX_BATCH):
            self._attempt(Batch(queue, messages[start : start + MAX_BATCH]))

    def _attempt(self, batch: Batch) -> None:
        batch.attempts += 1
        header = agent_pb2.ControlHeader(acknowledged_below=batch.queue.first_unacknowledged())
        for sent in batch.messages:
            header.messages.add(number=sent.number, kind=sent.kind)

        def add_header(envelope: agent_pb2.Envelope) -> None:
            envelope.control.CopyFrom(header)

        payloads = [sent.payload for sent in batch.messages]
        seconds = ATTEMPT_TIMEOUT_S * 2 ** min(batch.attempts - 1, MAX_DOUBLINGS)
        request = Request(CONTROL, payloads, timeout=seconds, header=add_header)
        try:
            future = self._agent.request(batch.queue.worker, request)
        except Exception as error:  # of a value that does not pickle, or of whatever else cannot be made or sent
            self._scheduler.submit(partial(self._fail, batch, error))
            return
        urgent = any(sent.urgent for sent in batch.messages)
        future.call_when_done(
            lambda done: self._scheduler.submit(partial(self._attempted, batch, done), urgent=urgent)
        )

    # On the control thread.

    def _attempted(self, batch: Batch, done: "torch.futures.Future[dict[int, bytes] | None]") -> None:
        error = error_of(done)
        if isinstance(error, RpcTimeoutError | SendFailedError | AnswerFailedError | WorkerSuspectError):
            pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(batch.attempts - 1, 16))
            batch.queue.paused.append(batch)
            self._scheduler.call_later(pause, partial(self._send_again, batch))
        elif error is not None:
            self._fail(batch, error)
        else:
            failures = value if isinstance(value := done.value(), dict) else {}
            for index, sent in enumerate(batch.messages):
                failure = failures.get(index)
                failed = self._agent.decode_failure(batch.queue.worker, failure) if failure else None
                self._settle(batch.queue, sent, failed)
        self._resume(batch.queue)

    def _send_again(self, batch: Batch) -> None:
        """Sends a batch again at the end of its pause, unless the worker was back before."""
        if batch in batch.queue.paused:
            batch.queue.paused.remove(batch)
            self._attempt(batch)

    def _send_paused(self, queue: ControlQueue) -> None:
        """Sends everything again whose pause has not ended."""
        paused, queue.paused = queue.paused, []
        for batch in paused:
            batch.attempts = 0
            self._attempt(batch)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Settles messages that cannot be sent or read together: each by itself, if one may be to blame."""
        concerns_all = isinstance(error, WorkerLostError | NotInitializedError)
        if len(batch.messages) == 1 or concerns_all:
            for sent in batch.messages:
                self._settle(batch.queue, sent, error)
        else:
            for sent in batch.messages:
                self._attempt(Batch(batch.queue, [sent]))
        self._resume(batch.queue)

    def _resume(self, queue: ControlQueue) -> None:
        """Sends the messages that have waited for acknowledgements."""
        if queue.is_full:
            self._flush(queue)

    def _settle(self, queue: ControlQueue, sent: ControlMessage, error: Exception | None) -> None:
        if error is not None and not isinstance(error, (WorkerLostError, NotInitializedError, *sent.expected)):
            log.warning("control message %s to %s failed: %s", sent.kind, queue.worker.name, printable_text(error))
        if queue.unacknowledged.pop(sent.number, None) is not None:  # else it was in two batches
            try:
                sent.done(error)
            except Exception:  # which must not keep others from being settled
                log.exception(
                    "the end of control message %s to %s cannot be handled", sent.kind, queue.worker.name
                )
