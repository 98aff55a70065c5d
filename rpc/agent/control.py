"""Messages among agents that must not get lost: the bookkeeping of references and contexts.

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
from typing import TYPE_CHECKING, Any, final

from ...errors import (
    AnswerFailedError,
    NotInitializedError,
    RpcTimeoutError,
    SendFailedError,
    SerializationError,
    WorkerLostError,
)
from ...proto.v1 import agent_pb2
from ..contracts.messages import Handler, Incoming, MessageType, Request
from ..contracts.worker import WorkerInfo
from ..execution.futures import error_of
from ..execution.kept_errors import copy_error
from ..execution.scheduler import Scheduler, SerialThread, Task

if TYPE_CHECKING:
    from ..contracts.agent import RpcAgent

__all__ = ["RetryingControlMessages"]

ATTEMPT_SECONDS = 5.0
"""How long one attempt waits for its acknowledgement."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0
"""Seconds between attempts: doubled from the first to the longest. An attempt that could not be sent is over
at once; any other only when its time is."""

log = logging.getLogger(__name__)

Done = Callable[[Exception | None], None]


@dataclass(slots=True)
class _Sent:
    """A message that is not acknowledged yet."""

    worker: WorkerInfo
    number: int
    kind: str
    payload: Any
    done: Done
    expected: tuple[type[Exception], ...] = ()
    attempts: int = 0


@dataclass(slots=True)
class _Received:
    """What has come from one sender."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    floor: int = 0
    outcomes: dict[int, Exception | None] = field(default_factory=dict)


@final
class RetryingControlMessages:
    """Sends and handles the control messages of one agent, by tasks that run one after another.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def __init__(self, agent: "RpcAgent", scheduler: Callable[[str, Task], Scheduler] = SerialThread) -> None:
        from ..contracts.agent import holder  # here, because agents hold a ControlMessages

        self._agent = agent
        self._handlers: dict[str, Callable[[WorkerInfo, Any], None]] = {}
        self._numbers: dict[int, int] = defaultdict(int)
        self._unacknowledged: dict[int, dict[int, _Sent]] = defaultdict(dict)
        self._received: dict[int, _Received] = defaultdict(_Received)
        self._received_lock = threading.Lock()
        self._scheduler = scheduler(f"gradwire-control-{agent.info.name}", lambda: holder.bind_thread(agent))

    def on(self, kind: str, handle: Callable[[WorkerInfo, Any], None]) -> None:
        """Registers what a kind of message does: `handle(sender, payload)`, which must not wait for others."""
        self._handlers[kind] = handle

    def kinds(self) -> Collection[str]:
        """The kinds of messages that are known here."""
        return self._handlers.keys()

    def send(
        self,
        worker: WorkerInfo,
        kind: str,
        payload: Any,
        done: Done = lambda _error: None,
        expected: tuple[type[Exception], ...] = (),
    ) -> None:
        """Sends a message until it is acknowledged.

        Args:
            worker: to whom.
            kind: what `on` was called with over there.
            payload: anything that pickles.
            done: called by a task with None, or with what the handler raised, or a
                WorkerLostError when the receiver is gone.
            expected: classes of errors by which the handler answers a question; others are logged as failures.
        """
        self._scheduler.submit(lambda: self._begin(_Sent(worker, 0, kind, payload, done, expected)))

    def run(self, task: Task) -> None:
        """Runs a task after everything that was asked for before, and never beside another."""
        self._scheduler.submit(task)

    def pending(self) -> int:
        """How many messages are not acknowledged yet."""
        return sum(map(len, list(self._unacknowledged.values())))

    def handler(self) -> Handler:
        """The handler of CONTROL messages."""
        return Handler(self._handle, description="a control message to worker")

    def close(self) -> None:
        """Ends the tasks. What is unacknowledged is given up."""
        self._scheduler.close(ATTEMPT_SECONDS)

    # Sending: all by tasks of the scheduler.

    def _begin(self, sent: _Sent) -> None:
        sent.number = self._numbers[sent.worker.id]
        self._numbers[sent.worker.id] += 1
        self._unacknowledged[sent.worker.id][sent.number] = sent
        self._attempt(sent)

    def _attempt(self, sent: _Sent) -> None:
        sent.attempts += 1
        below = min(self._unacknowledged[sent.worker.id])
        control = agent_pb2.ControlHeader(number=sent.number, acknowledged_below=below, kind=sent.kind)
        try:
            future = self._agent.request(
                sent.worker,
                Request(
                    MessageType.CONTROL,
                    sent.payload,
                    timeout=ATTEMPT_SECONDS,
                    header=lambda envelope: envelope.control.CopyFrom(control),
                ),
            )
        except (NotInitializedError, SerializationError) as error:
            self._settle(sent, error)
            return
        future.add_done_callback(
            lambda done: self._scheduler.submit(lambda: self._attempted(sent, error_of(done)))
        )

    def _attempted(self, sent: _Sent, error: Exception | None) -> None:
        if isinstance(error, RpcTimeoutError | SendFailedError | AnswerFailedError):
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(sent.attempts - 1, 16))
            self._scheduler.call_later(pause, lambda: self._attempt(sent))
            return
        if error is not None and not isinstance(error, (WorkerLostError, NotInitializedError, *sent.expected)):
            log.warning("control message %s to %s failed: %s", sent.kind, sent.worker.name, error)
        self._settle(sent, error)

    def _settle(self, sent: _Sent, error: Exception | None) -> None:
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
