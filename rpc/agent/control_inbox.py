"""The control messages that a worker receives: each is processed once, and its outcome kept for a repetition.

control.py has the protocol.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from ...c10d.security import printable
from ...errors import LimitReachedError, RpcError
from ..contracts.control import ControlHandler
from ..contracts.messages import Incoming, PiggybackedAnswer
from ..contracts.worker import WorkerInfo
from ..execution.kept_errors import printable_text
from ..wire.failures import encode_failure

__all__ = ["WINDOW", "ControlInbox", "OnRefused"]

WINDOW = 1 << 14
"""Numbers, from the first that is not acknowledged, with which messages are sent to a worker, or accepted."""

MAX_FAILURE_BYTES = 8 << 10
"""Bytes of an outcome that is kept."""

OnRefused = Callable[[WorkerInfo, Exception], None]
"""Takes the sender of a control message, and the error that its handler has raised."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Received:
    """Control messages received from one worker, by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    floor: int = 0
    outcomes: dict[int, bytes | None] = field(default_factory=dict)
    """The encoded error of each handler that has raised one."""


@final
class ControlInbox:
    """Processes the control messages of all workers, on the executor's threads."""

    def __init__(self) -> None:
        self.handlers: dict[str, ControlHandler] = {}
        """By kind of message."""
        self.on_refused: OnRefused = lambda _source, _error: None
        """Called when a handler has raised."""
        self.received: dict[int, _Received] = defaultdict(_Received)
        """By the sender's wire id."""
        self._lock = threading.Lock()

    def process(self, message: Incoming) -> dict[int, bytes] | PiggybackedAnswer | None:
        """Processes control messages; returns the encoded errors of those that failed, by index."""
        failures = self._process_all(message)
        return PiggybackedAnswer(failures) if message.envelope.answer_can_wait else failures

    def _process_all(self, message: Incoming) -> dict[int, bytes] | None:
        header, payloads = message.envelope.control, message.value
        if len(header.messages) != len(payloads):
            raise ValueError(f"{len(header.messages)} control messages with {len(payloads)} payloads")
        with self._lock:
            received = self.received[message.source.wire_id]
        failures = {}
        with received.lock:
            if header.acknowledged_below > received.floor:
                received.floor = header.acknowledged_below
                for number in [n for n in received.outcomes if n < received.floor]:
                    del received.outcomes[number]
            if any(each.number >= received.floor + WINDOW for each in header.messages):
                raise LimitReachedError(
                    f"control messages with numbers from {received.floor + WINDOW} on are refused",
                    f"WINDOW={WINDOW}",
                )
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
            self.handlers[kind](source, payload)
        except Exception as error:
            problem = printable_text(error)
            log.info("control message %s of worker %s is refused: %s", printable(kind), source.name, problem)
            self.on_refused(source, error)
            failure = encode_failure(error)
            if len(failure) > MAX_FAILURE_BYTES:
                failure = encode_failure(RpcError(f"{type(error).__name__}: {str(error)[:1000]}"))
            return failure
        return None
