"""Control messages: messages between agents that must not get lost, such as those that count references.

A control message is sent again until it is acknowledged, and processed once. Each sender numbers those it
sends to each receiver. The receiver keeps the outcome of those it has processed and answers a repetition
with it; every message says below which number everything is acknowledged, so outcomes are kept only while a
repetition can still come, and a later straggler is recognised by its number alone.

Control messages to one worker travel together, as many as there are when the control thread comes to them, and are
acknowledged together. Those that are not urgent wait up to LINGER_S (execution/scheduler.py) for others.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch

from ...errors import (
    AnswerFailedError,
    NotInitializedError,
    RpcTimeoutError,
    SendFailedError,
    SerializationError,
    WorkerLostError,
)
from ...proto.v1 import agent_pb2
from ..contracts.agent import RpcAgent, holder
from ..contracts.control import ControlHandler, OnSettled
from ..contracts.messages import Handler, Incoming, MessageType, Request
from ..contracts.worker import WorkerInfo
from ..execution.futures import error_of
from ..execution.scheduler import Scheduler, SerialThread, Task
from ..wire.failures import decode_failure, encode_failure

__all__ = ["RetryingControlMessages"]

ATTEMPT_TIMEOUT_S = 5.0
"""Seconds that one attempt waits for its acknowledgement."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
"""Seconds between attempts: doubled from the first to the longest. An attempt that could not be sent ends at once,
any other when its time is up."""

MAX_BATCH = 256
"""Messages that travel together, at most."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unacknowledged:
    """A message that has been sent and is not acknowledged yet."""

    kind: str
    payload: Any
    done: OnSettled
    expected: tuple[type[Exception], ...]
    urgent: bool
    number: int = -1


@dataclass(slots=True)
class _Batch:
    """Messages to one worker that travel together."""

    worker: WorkerInfo
    messages: list[_Unacknowledged]
    attempts: int = 0


@dataclass(slots=True)
class _Inbox:
    """Control messages received from one worker, by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    floor: int = 0
    outcomes: dict[int, bytes | None] = field(default_factory=dict)
    """The encoded error of each handler that has raised one."""


@final
class RetryingControlMessages:
    """Sends control messages until they are acknowledged, and processes each that arrives once.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def __init__(self, agent: RpcAgent, scheduler: Callable[[str, Task], Scheduler] = SerialThread) -> None:
        self._agent = agent
        self._handlers: dict[str, Callable[[WorkerInfo, Any], None]] = {}
        self._numbers: dict[int, int] = defaultdict(int)
        self._unacknowledged: dict[int, dict[int, _Unacknowledged]] = defaultdict(dict)
        """By worker and number, in the order of the numbers."""
        self._queued: dict[int, list[_Unacknowledged]] = {}
        """The unacknowledged messages that are not in a batch yet, by worker."""
        self._received: dict[int, _Inbox] = defaultdict(_Inbox)
        self._received_lock = threading.Lock()
        self._scheduler = scheduler(f"gradwire-control-{agent.info.name}", lambda: holder.bind_thread(agent))

    def on(self, kind: str, handle: ControlHandler) -> None:
        """Registers what a kind of message does."""
        self._handlers[kind] = handle

    def kinds(self) -> Collection[str]:
        """Returns the registered kinds."""
        return self._handlers.keys()

    def send(
        self,
        worker: WorkerInfo,
        kind: str,
        payload: Any,
        done: OnSettled = lambda _error: None,
        expected: tuple[type[Exception], ...] = (),
        *,
        urgent: bool = True,
    ) -> None:
        """Sends a message, again and again until it is acknowledged: see `ControlMessages.send`."""
        sent = _Unacknowledged(kind, payload, done, expected, urgent)
        self._scheduler.submit(partial(self._begin, worker, sent), urgent=urgent)

    def run(self, task: Task, *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before."""
        self._scheduler.submit(task, urgent=urgent)

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""
        return sum(map(len, list(self._unacknowledged.values())))

    def handler(self) -> Handler:
        """Returns the handler of CONTROL messages."""
        return Handler(self._handle, description="a control message to worker")

    def close(self) -> None:
        """Ends the control thread; messages that are not acknowledged are dropped."""
        self._scheduler.close(ATTEMPT_TIMEOUT_S)

    # Sending: all by tasks of the scheduler.

    def _begin(self, worker: WorkerInfo, sent: _Unacknowledged) -> None:
        sent.number = self._numbers[worker.id]
        self._numbers[worker.id] += 1
        self._unacknowledged[worker.id][sent.number] = sent
        if worker.id in self._queued:
            self._queued[worker.id].append(sent)
        else:
            self._queued[worker.id] = [sent]
            self._scheduler.submit(partial(self._flush, worker))  # after the tasks that are queued already

    def _flush(self, worker: WorkerInfo) -> None:
        messages = self._queued.pop(worker.id)
        for start in range(0, len(messages), MAX_BATCH):
            self._attempt(_Batch(worker, messages[start : start + MAX_BATCH]))

    def _attempt(self, batch: _Batch) -> None:
        batch.attempts += 1
        header = agent_pb2.ControlHeader(acknowledged_below=next(iter(self._unacknowledged[batch.worker.id])))
        for sent in batch.messages:
            header.messages.add(number=sent.number, kind=sent.kind)
        try:
            future = self._agent.request(
                batch.worker,
                Request(
                    MessageType.CONTROL,
                    [sent.payload for sent in batch.messages],
                    timeout=ATTEMPT_TIMEOUT_S,
                    header=lambda envelope: envelope.control.CopyFrom(header),
                ),
            )
        except (NotInitializedError, SerializationError) as error:
            self._fail(batch, error)
            return
        urgent = any(sent.urgent for sent in batch.messages)
        future.add_done_callback(
            lambda done: self._scheduler.submit(partial(self._attempted, batch, done), urgent=urgent)
        )

    def _attempted(self, batch: _Batch, done: "torch.futures.Future[dict[int, bytes] | None]") -> None:
        error = error_of(done)
        if isinstance(error, RpcTimeoutError | SendFailedError | AnswerFailedError):
            pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(batch.attempts - 1, 16))
            self._scheduler.call_later(pause, partial(self._attempt, batch))
        elif error is not None:
            self._fail(batch, error)
        else:
            failures = done.value() or {}
            for index, sent in enumerate(batch.messages):
                failure = failures.get(index)
                self._settle(batch.worker, sent, decode_failure(failure, batch.worker.name) if failure else None)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """Settles messages that cannot be sent or read together: each by itself, if one may be to blame."""
        concerns_all = isinstance(error, WorkerLostError | NotInitializedError)
        if len(batch.messages) == 1 or concerns_all:
            for sent in batch.messages:
                self._settle(batch.worker, sent, error)
        else:
            for sent in batch.messages:
                self._attempt(_Batch(batch.worker, [sent]))

    def _settle(self, worker: WorkerInfo, sent: _Unacknowledged, error: Exception | None) -> None:
        if error is not None and not isinstance(error, (WorkerLostError, NotInitializedError, *sent.expected)):
            log.warning("control message %s to %s failed: %s", sent.kind, worker.name, error)
        del self._unacknowledged[worker.id][sent.number]
        sent.done(error)

    # Receiving: on the executor's threads.

    def _handle(self, message: Incoming) -> dict[int, bytes] | None:
        """Processes control messages; returns the encoded errors of those that failed, by index."""
        header, payloads = message.envelope.control, message.value
        if len(header.messages) != len(payloads):
            raise ValueError(f"{len(header.messages)} control messages with {len(payloads)} payloads")
        with self._received_lock:
            received = self._received[message.source.id]
        failures = {}
        with received.lock:
            received.floor = max(received.floor, header.acknowledged_below)
            for number in [n for n in received.outcomes if n < received.floor]:
                del received.outcomes[number]
            for index, (each, payload) in enumerate(zip(header.messages, payloads, strict=True)):
                if each.number < received.floor:
                    continue  # a straggler of a message that was acknowledged long ago
                if each.number not in received.outcomes:
                    received.outcomes[each.number] = self._process(message.source, each.kind, payload)
                if (failure := received.outcomes[each.number]) is not None:
                    failures[index] = failure
        return failures or None

    def _process(self, source: WorkerInfo, kind: str, payload: Any) -> bytes | None:
        try:
            self._handlers[kind](source, payload)
        except Exception as error:
            return encode_failure(error)
        return None
