"""The contract of control messages: messages between agents that must not get lost."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from .worker import WorkerInfo

__all__ = ["ControlHandler", "ControlMessages", "OnSettled"]

ControlHandler = Callable[[WorkerInfo, Any], None]
"""Processes a control message; takes the sender and the payload. Must not wait for other workers."""

OnSettled = Callable[[Exception | None], None]
"""Called when a control message is acknowledged (None), or has failed for good (the error)."""


class ControlMessages(Protocol):
    """Sends and processes the control messages of one agent: each arrives once, as long as its receiver lives.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def on(self, kind: str, handle: ControlHandler) -> None:
        """Registers what a kind of message does."""

    def kinds(self) -> Collection[str]:
        """Returns the registered kinds."""

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
        """Sends a message, again and again until it is acknowledged. Messages to one worker travel together.

        Args:
            worker: the receiver.
            kind: a kind that the receiver has a handler for.
            payload: anything that pickles.
            done: called on the control thread with None, with what the handler raised, or with a WorkerLostError
                if the receiver is gone.
            expected: classes of errors that the handler answers with on purpose; others are logged.
            urgent: False if it may wait some milliseconds for others to travel with.
        """

    def run(self, task: Callable[[], None], *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before.

        Args:
            task: what to run.
            urgent: False if it may wait some milliseconds for others, which then share one wake-up of the thread.
        """

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""
