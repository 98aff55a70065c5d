"""What is to be sent to one worker as control messages, and what has been sent and is not acknowledged."""

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, final

from ..contracts.control import OnSettled
from ..contracts.worker import WorkerInfo
from .control_inbox import WINDOW

__all__ = ["Batch", "ControlMessage", "ControlQueue", "do_nothing"]

MAX_FAILED = 1 << 10
"""Errors that there are to tell a worker, at most, of messages that it has attached to others. If there are more,
it asks for the first ones again."""


def do_nothing(_error: Exception | None) -> None:
    """The OnSettled of a message whose end nobody waits for."""


@dataclass(slots=True)
class ControlMessage:
    """A message that is not acknowledged yet."""

    kind: str
    payload: Any
    done: OnSettled
    expected: tuple[type[Exception], ...]
    urgent: bool
    number: int = -1
    is_attached: bool = False
    """Whether it was attached to another message, and has not been sent otherwise."""


@final
class ControlQueue:
    """The control messages to one worker."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.lingering: deque[ControlMessage] = deque()
        """Messages that are not urgent, and have not been sent."""
        self.urgent: deque[ControlMessage] = deque()
        """Other messages that have not been sent."""
        self.processed: deque[int] = deque(maxlen=WINDOW)
        """The numbers of messages from the worker that were attached to others, and have been processed."""
        self.failed: deque[tuple[int, bytes]] = deque(maxlen=MAX_FAILED)
        """Those whose handlers have raised, with the encoded errors."""
        self.next_number = 0
        self.is_full = False
        """Whether messages wait until some that have been sent are acknowledged."""
        self.is_checked = False
        """Whether a timer is set for the control thread, which alone uses this, to look whether attached messages
        have been acknowledged."""
        self.unacknowledged: dict[int, ControlMessage] = {}
        """Messages that have been sent, in the order of their numbers."""
        self.paused: list[Batch] = []
        """Batches that have failed and will be sent again. Used on the control thread."""
        self.sending = threading.Lock()
        """Held by the thread that sends messages and numbers them. No thread waits for it."""

    def has_outcomes(self) -> bool:
        """Returns whether there is something to tell the worker of messages that it has attached to others."""
        return bool(self.processed or self.failed)

    def drop_outcomes(self) -> None:
        """Forgets what there is to tell the worker."""
        self.processed.clear()
        self.failed.clear()

    def pending(self) -> int:
        """Returns the number of messages that are not acknowledged."""
        queued = sum(sent.number < 0 for queue in (self.lingering, self.urgent) for sent in queue.copy())
        return queued + len(self.unacknowledged)

    def number(self, messages: list[ControlMessage]) -> None:
        """Numbers messages that are about to be sent. Called by the thread that holds `sending`."""
        for sent in messages:
            if sent.number < 0:
                sent.number = self.next_number
                self.next_number += 1
            self.unacknowledged[sent.number] = sent

    def first_unacknowledged(self) -> int:
        """Returns the number below which all messages are acknowledged."""
        while True:
            with contextlib.suppress(RuntimeError):  # the dict has changed
                return next(iter(self.unacknowledged), self.next_number)

    def exceeds_window(self, count: int) -> bool:
        """Returns whether so many further messages have to wait until others are acknowledged."""
        return self.next_number + count > self.first_unacknowledged() + WINDOW


@dataclass(slots=True, eq=False)
class Batch:
    """Messages to one worker that travel together as a request."""

    queue: ControlQueue
    messages: list[ControlMessage]
    attempts: int = 0
