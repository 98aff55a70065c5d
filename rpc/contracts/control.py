"""The contract of control messages: messages between agents that must not get lost."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from .worker import WorkerInfo

__all__ = ["CANCELLED", "ControlHandler", "ControlMessages", "ControlValues", "OnSettled"]

CANCELLED = "call.cancelled"
"""The kind of message that cancels a request, which it names by its id, as CANCEL does, but cannot get lost."""

ControlHandler = Callable[[WorkerInfo, Any], None]
"""Processes a control message; takes the sender and the payload. Must not wait for other workers."""

OnSettled = Callable[[Exception | None], None]
"""Called when a control message is acknowledged (None), or has failed for good (the error)."""


class ControlValues(Protocol):
    """Pickles the payloads of control messages, and records those that are refused."""

    def dumps(self, value: object) -> bytes:
        """Returns a pickle of a value. Raises what pickling raises."""

    def load(self, source: WorkerInfo, data: bytes) -> Any:
        """Returns the value of a pickle from a worker. Raises PolicyError, or what unpickling raises."""

    def record_refusal(self, source: WorkerInfo, error: BaseException) -> None:
        """Records why a message of a worker is refused."""


class ControlMessages(Protocol):
    """Sends and processes the control messages of one agent: each arrives once, as long as its receiver lives.

    `send` and `run` take no lock, so finalizers may call them.
    """

    def on(self, kind: str, handle: ControlHandler, *, is_quick: bool = False) -> None:
        """Registers what a kind of message does.

        `is_quick` says that `handle` never blocks, and runs code of gradwire only. Then it may run on the thread
        that reads the message, as soon as that has arrived.
        """

    def kinds(self) -> Collection[str]:
        """Returns the registered kinds."""

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
        """Sends a message, again if it may be lost. Those to one worker arrive in the order of these calls.

        Args:
            worker: the receiver.
            kind: a kind that the receiver has a handler for.
            payload: a tuple of integers from 0 to 2**64 - 1, which needs no pickle, or else anything that pickles.
            done: called on the control thread with None, with what the handler raised, or with a WorkerLostError
                if the receiver is gone.
            expected: classes of errors that the handler answers with on purpose; others are logged.
            urgent: False if it may wait some milliseconds for others to travel with.
        """

    def run(self, task: Callable[[], None], *, urgent: bool = True) -> None:
        """Runs a task on the control thread, after everything that was submitted before.

        One that is not urgent may wait some milliseconds for others, which then share one wake-up of the thread.
        """

    def pending(self) -> int:
        """Returns how many sent messages are not acknowledged yet."""
