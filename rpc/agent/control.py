"""Control messages: messages between agents that must not get lost, such as those that count references.

A control message is sent again until it is acknowledged, and processed once. Each sender numbers those it
sends to each receiver. The receiver keeps the outcome of those it has processed and answers a repetition
with it; every message says below which number everything is acknowledged, so outcomes are kept only while a
repetition can still come, and a later straggler is recognised by its number alone.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, final

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
from ..execution.kept_errors import copy_error
from ..execution.scheduler import Scheduler, SerialThread, Task

__all__ = ["RetryingControlMessages"]

ATTEMPT_TIMEOUT_S = 5.0
"""Seconds that one attempt waits for its acknowledgement."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
"""Seconds between attempts: doubled from the first to the longest. An attempt that could not be sent ends at once,
any other when its time is up."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Unacknowledged:
    """A message that has been sent and is not acknowledged yet."""

    worker: WorkerInfo
    number: int
    kind: str
    payload: Any
    done: OnSettled
    expected: tuple[type[Exception], ...] = ()
    attempts: int = 0


@dataclass(slots=True)
class _Inbox:
    """Control messages received from one worker, by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    floor: int = 0
    outcomes: dict[int, Exception | None] = field(default_factory=dict)


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
    ) -> None:
        """Sends a message, again and again until it is acknowledged: see `ControlMessages.send`."""
        sent = _Unacknowledged(worker, 0, kind, payload, done, expected)
        self._scheduler.submit(lambda: self._begin(sent))

    def run(self, task: Task) -> None:
        """Runs a task on the control thread, after everything that was submitted before."""
        self._scheduler.submit(task)

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

    def _begin(self, sent: _Unacknowledged) -> None:
        sent.number = self._numbers[sent.worker.id]
        self._numbers[sent.worker.id] += 1
        self._unacknowledged[sent.worker.id][sent.number] = sent
        self._attempt(sent)

    def _attempt(self, sent: _Unacknowledged) -> None:
        sent.attempts += 1
        below = min(self._unacknowledged[sent.worker.id])
        control = agent_pb2.ControlHeader(number=sent.number, acknowledged_below=below, kind=sent.kind)
        try:
            future = self._agent.request(
                sent.worker,
                Request(
                    MessageType.CONTROL,
                    sent.payload,
                    timeout=ATTEMPT_TIMEOUT_S,
                    header=lambda envelope: envelope.control.CopyFrom(control),
                ),
            )
        except (NotInitializedError, SerializationError) as error:
            self._settle(sent, error)
            return
        future.add_done_callback(
            lambda done: self._scheduler.submit(lambda: self._attempted(sent, error_of(done)))
        )

    def _attempted(self, sent: _Unacknowledged, error: Exception | None) -> None:
        if isinstance(error, RpcTimeoutError | SendFailedError | AnswerFailedError):
            pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(sent.attempts - 1, 16))
            self._scheduler.call_later(pause, lambda: self._attempt(sent))
            return
        if error is not None and not isinstance(error, (WorkerLostError, NotInitializedError, *sent.expected)):
            log.warning("control message %s to %s failed: %s", sent.kind, sent.worker.name, error)
        self._settle(sent, error)

    def _settle(self, sent: _Unacknowledged, error: Exception | None) -> None:
        del self._unacknowledged[sent.worker.id][sent.number]
        sent.done(error)

    # Receiving: on the executor's threads.

    def _handle(self, message: Incoming) -> None:
        header = message.envelope.control
        with self._received_lock:
            received = self._received[message.source.id]
        with received.lock:
            received.floor = max(received.floor, header.acknowledged_below)
            for number in [n for n in received.outcomes if n < received.floor]:
                del received.outcomes[number]
            if header.number < received.floor:
                return  # a straggler of a message that was acknowledged long ago
            if header.number not in received.outcomes:
                received.outcomes[header.number] = self._process(message)
            error = received.outcomes[header.number]
        if error is not None:
            raise copy_error(error)  # the kept one must not collect the frames of every thread that raises it

    def _process(self, message: Incoming) -> Exception | None:
        try:
            self._handlers[message.envelope.control.kind](message.source, message.value)
        except Exception as error:
            return error.with_traceback(None)  # it is kept, and its frames would be too
        return None
