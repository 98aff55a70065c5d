"""Control messages: messages between agents that must not get lost, such as those that count references.

A control message is sent again until it is acknowledged, and processed once. Each sender numbers those it
sends to each receiver. The receiver keeps the outcome of those it has processed and answers a repetition
with it; every message says below which number everything is acknowledged, so outcomes are kept only while a
repetition can still come, and a later straggler is recognised by its number alone.

Control messages to one worker travel together, as many as there are when the control thread comes to them, and are
acknowledged together. Those that are not urgent wait up to LINGER_S (execution/scheduler.py) for others. After
PIGGYBACK_AFTER_S they are piggybacked on any other message to the worker: they go behind it, in the same write of
a socket, which costs no system call and no wake-up more. Their acknowledgement comes back in the same way.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
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
from ..contracts.messages import Handler, MessageType, Request
from ..contracts.worker import WorkerInfo
from ..execution.futures import error_of
from ..execution.kept_errors import printable_text
from ..execution.scheduler import Scheduler, SerialThread, Task
from .control_inbox import WINDOW, ControlInbox, OnRefused

__all__ = ["RetryingControlMessages"]

ATTEMPT_TIMEOUT_S = 5.0
"""Seconds that one attempt waits for its acknowledgement."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
"""Seconds between attempts: doubled from the first to the longest. An attempt that could not be sent ends at once,
any other when its time is up."""

PIGGYBACK_AFTER_S = 0.004
"""Seconds that control messages wait for others of their kind: a batch costs more than the messages in it."""

RETRY_AFTER_S = 0.001
"""Seconds after which the control thread looks again if another thread is sending control messages to a worker."""

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


@final
class _Peer:
    """What is to be sent to one worker."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.lingering: deque[_Unacknowledged] = deque()
        """Messages that are not urgent, and have not been sent."""
        self.urgent: deque[_Unacknowledged] = deque()
        """Other messages that have not been sent."""
        self.next_number = 0
        self.is_full = False
        """Whether messages wait until some that have been sent are acknowledged."""
        self.unacknowledged: dict[int, _Unacknowledged] = {}
        """Messages that have been sent, in the order of their numbers."""
        self.paused: list[_Batch] = []
        """Batches that have failed and will be sent again. Used on the control thread."""
        self.sending = threading.Lock()
        """Held by the thread that sends messages and numbers them. No thread waits for it."""

    def pending(self) -> int:
        """Returns the number of messages that are not acknowledged."""
        queued = sum(sent.number < 0 for queue in (self.lingering, self.urgent) for sent in queue.copy())
        return queued + len(self.unacknowledged)


@dataclass(slots=True, eq=False)
class _Batch:
    """Messages to one worker that travel together."""

    peer: _Peer
    messages: list[_Unacknowledged]
    attempts: int = 0

    def first_unacknowledged(self) -> int:
        """Returns the number below which all messages to the worker are acknowledged."""
        while True:
            with contextlib.suppress(RuntimeError):  # the dict has changed
                return next(iter(self.peer.unacknowledged), self.messages[0].number)

    def exceeds_window(self) -> bool:
        """Returns whether the messages have to wait until others are acknowledged."""
        first = self.first_unacknowledged() if self.peer.unacknowledged else self.peer.next_number
        return self.peer.next_number + len(self.messages) > first + WINDOW


@final
class RetryingControlMessages:
    """Sends control messages until they are acknowledged, and processes each that arrives once.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def __init__(self, agent: RpcAgent, scheduler: Callable[[str, Task], Scheduler] = SerialThread) -> None:
        self.waiting: dict[int, float] = {}
        """Since when messages wait, by worker id. Who sends another message calls `piggyback` if any do."""
        self._agent = agent
        self._inbox = ControlInbox()
        self._peers: dict[int, _Peer] = {}
        """By worker id."""
        self._scheduler = scheduler(f"gradwire-control-{agent.info.name}", lambda: holder.bind_thread(agent))

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
        done: OnSettled = lambda _error: None,
        expected: tuple[type[Exception], ...] = (),
        *,
        urgent: bool = True,
    ) -> None:
        """Sends a message, again and again until it is acknowledged: see `ControlMessages.send`."""
        sent = _Unacknowledged(kind, payload, done, expected, urgent)
        peer = self._peers.get(worker.wire_id)
        if peer is None:
            peer = self._peers.setdefault(worker.wire_id, _Peer(worker))
        if urgent:
            peer.urgent.append(sent)
            self._scheduler.submit(partial(self._flush, peer))
        else:
            peer.lingering.append(sent)
            if worker.wire_id not in self.waiting:
                self._linger(peer)

    def run(self, task: Task, *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before."""
        self._scheduler.submit(task, urgent=urgent)

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""
        return sum(peer.pending() for peer in list(self._peers.values()))

    def handler(self, on_refused: OnRefused) -> Handler:
        """Returns the handler of CONTROL messages, which calls `on_refused` when that of a kind has raised."""
        self._inbox.on_refused = on_refused
        return Handler(self._inbox.process, description="a control message to worker", is_quick=True)

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Sends at once what was not acknowledged while a worker was suspect."""
        if (peer := self._peers.get(worker.wire_id)) is not None:
            self._scheduler.submit(partial(self._send_paused, peer))

    def close(self) -> None:
        """Ends the control thread; messages that are not acknowledged are dropped."""
        self._scheduler.close(ATTEMPT_TIMEOUT_S)

    # Sending: on the control thread, and on those that send the messages on which others are piggybacked.

    def piggyback(self, worker: WorkerInfo) -> None:
        """Puts messages that wait behind the next message to a worker. Called by the thread that sends it."""
        since = self.waiting.get(worker.wire_id)
        if since is None or time.monotonic() < since + PIGGYBACK_AFTER_S:
            return
        try:
            self._send_queued(self._peers[worker.wire_id], piggybacked=True)
        except Exception:  # which is not that of the other message
            log.exception("control messages cannot be sent to %s", worker.name)

    def _linger(self, peer: _Peer) -> None:
        self.waiting[peer.worker.wire_id] = time.monotonic()
        self._scheduler.submit(partial(self._flush, peer), urgent=False)

    def _flush(self, peer: _Peer) -> None:
        if not self._send_queued(peer, piggybacked=False):
            self._scheduler.call_later(RETRY_AFTER_S, partial(self._flush, peer))

    def _send_queued(self, peer: _Peer, *, piggybacked: bool) -> bool:
        """Sends the messages that are queued for a worker; if piggybacked, one batch of those that are not urgent.

        Returns:
            False if another thread is at it.
        """
        held: list[bool] = []
        try:
            # By one call, which Ctrl-C cannot interrupt.
            held.extend(map(peer.sending.acquire, (False,)))
            if not held[0]:
                return False
            is_sent = self._send_some(peer, piggybacked=piggybacked)
            while is_sent and not piggybacked and (peer.lingering or peer.urgent):
                is_sent = self._send_some(peer, piggybacked=False)
        finally:
            if held == [True]:
                peer.sending.release()
        self.waiting.pop(peer.worker.wire_id, None)
        # Left over, or queued in between by a thread that has seen others wait.
        if peer.lingering and not peer.is_full:
            self._linger(peer)
        return True

    def _send_some(self, peer: _Peer, *, piggybacked: bool) -> bool:
        """Sends the messages that are queued first together; returns False if more must not be sent now."""
        lingering = list(itertools.islice(peer.lingering.copy(), MAX_BATCH))
        urgent = [] if piggybacked else list(itertools.islice(peer.urgent.copy(), MAX_BATCH - len(lingering)))
        messages = [*lingering, *urgent]
        if not messages:
            return True
        batch = _Batch(peer, messages)
        while batch.exceeds_window():
            if peer.is_full:
                return False
            peer.is_full = True  # the thread that handles acknowledgements looks at it after them
        peer.is_full = False
        for sent in messages:
            if sent.number < 0:
                number = peer.next_number
                peer.next_number = number + 1  # before it is given away: Ctrl-C may come in between
                sent.number = number
            peer.unacknowledged[sent.number] = sent
        self._attempt(batch, piggybacked=piggybacked)
        # Not before, because Ctrl-C may come at any step.
        for _ in lingering:
            peer.lingering.popleft()
        for _ in urgent:
            peer.urgent.popleft()
        return True

    def _attempt(self, batch: _Batch, *, piggybacked: bool = False) -> None:
        batch.attempts += 1
        header = agent_pb2.ControlHeader(acknowledged_below=batch.first_unacknowledged())
        for sent in batch.messages:
            header.messages.add(number=sent.number, kind=sent.kind)

        def add_header(envelope: agent_pb2.Envelope) -> None:
            envelope.control.CopyFrom(header)
            envelope.answer_can_wait = piggybacked

        try:
            future = self._agent.request(
                batch.peer.worker,
                Request(
                    MessageType.CONTROL,
                    [sent.payload for sent in batch.messages],
                    timeout=ATTEMPT_TIMEOUT_S,
                    header=add_header,
                ),
            )
        except Exception as error:  # of a value that does not pickle, or of whatever else cannot be made or sent
            self._scheduler.submit(partial(self._fail, batch, error))
            return
        urgent = any(sent.urgent for sent in batch.messages)
        future.call_when_done(
            lambda done: self._scheduler.submit(partial(self._attempted, batch, done), urgent=urgent)
        )

    # On the control thread.

    def _attempted(self, batch: _Batch, done: "torch.futures.Future[dict[int, bytes] | None]") -> None:
        error = error_of(done)
        if isinstance(error, RpcTimeoutError | SendFailedError | AnswerFailedError | WorkerSuspectError):
            pause = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(batch.attempts - 1, 16))
            batch.peer.paused.append(batch)
            self._scheduler.call_later(pause, partial(self._send_again, batch))
        elif error is not None:
            self._fail(batch, error)
        else:
            failures = value if isinstance(value := done.value(), dict) else {}
            for index, sent in enumerate(batch.messages):
                failure = failures.get(index)
                failed = self._agent.decode_failure(batch.peer.worker, failure) if failure else None
                self._settle(batch.peer, sent, failed)
        self._resume(batch.peer)

    def _send_again(self, batch: _Batch) -> None:
        """Sends a batch again at the end of its pause, unless the worker was back before."""
        if batch in batch.peer.paused:
            batch.peer.paused.remove(batch)
            self._attempt(batch)

    def _send_paused(self, peer: _Peer) -> None:
        """Sends everything again whose pause has not ended."""
        paused, peer.paused = peer.paused, []
        for batch in paused:
            batch.attempts = 0
            self._attempt(batch)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """Settles messages that cannot be sent or read together: each by itself, if one may be to blame."""
        concerns_all = isinstance(error, WorkerLostError | NotInitializedError)
        if len(batch.messages) == 1 or concerns_all:
            for sent in batch.messages:
                self._settle(batch.peer, sent, error)
        else:
            for sent in batch.messages:
                self._attempt(_Batch(batch.peer, [sent]))
        self._resume(batch.peer)

    def _resume(self, peer: _Peer) -> None:
        """Sends the messages that have waited for acknowledgements."""
        if peer.is_full:
            self._flush(peer)

    def _settle(self, peer: _Peer, sent: _Unacknowledged, error: Exception | None) -> None:
        if error is not None and not isinstance(error, (WorkerLostError, NotInitializedError, *sent.expected)):
            log.warning("control message %s to %s failed: %s", sent.kind, peer.worker.name, printable_text(error))
        if peer.unacknowledged.pop(sent.number, None) is not None:  # else it was in two batches
            try:
                sent.done(error)
            except Exception:  # which must not keep others from being settled
                log.exception("the end of control message %s to %s cannot be handled", sent.kind, peer.worker.name)
