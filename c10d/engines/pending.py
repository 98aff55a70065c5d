"""Operations in flight: the contract of those that engines return, and operations made of others."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, final

__all__ = ["CombinedOperation", "CompletedOperation", "OperationWithFinalStep", "PendingOperation"]


class PendingOperation(Protocol):
    """An operation that an engine has started.

    All methods may be called from any thread, at the same time, and any number of times.
    """

    def wait(self, timeout: float | None) -> None:
        """Blocks until the operation is done.

        Args:
            timeout: seconds to wait at most; the operation stays in flight afterwards. None waits until the
                operation is done or its own timeout has expired.

        Raises:
            TimeoutError: the operation is still in flight after `timeout` seconds.
            Exception: the error that the operation failed with, on every call.
        """

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not. Does not block."""

    def source(self) -> int:
        """Returns the rank that sent the message. Defined for receives that are done."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already.

        The callback may run on any thread, must not raise, and must not wait for other operations.
        """


@final
class CombinedOperation:
    """Several operations as one, which is done when all of them are."""

    def __init__(self, parts: Sequence[PendingOperation]) -> None:
        self._parts = parts

    def wait(self, timeout: float | None) -> None:
        """Waits for each part in turn, at most `timeout` seconds for each. Raises the first error."""
        for part in self._parts:
            part.wait(timeout)

    def done(self) -> bool:
        """Returns whether all parts have finished, successfully or not."""
        return all(part.done() for part in self._parts)

    def source(self) -> int:
        """Returns the rank that sent the message of the last part, a receive."""
        return self._parts[-1].source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the last part has finished."""
        lock = threading.Lock()
        remaining = len(self._parts)

        def on_part_done() -> None:
            nonlocal remaining
            with lock:
                remaining -= 1
                is_last = not remaining
            if is_last:
                callback()

        for part in self._parts:
            part.on_done(on_part_done)


@final
class CompletedOperation:
    """An operation that has succeeded already.

    Args:
        source: the rank that sent, if the operation is a receive.
    """

    __slots__ = ("_source",)

    def __init__(self, source: int | None) -> None:
        self._source = source

    def wait(self, timeout: float | None) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """Returns True."""
        return True

    def source(self) -> int:
        """Returns the rank that sent the received message."""
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at once."""
        callback()


@final
class OperationWithFinalStep:
    """An operation with a final step on the host, which runs before anybody sees the operation as done.

    Args:
        pending: the operation.
        finish: the final step. The first thread that learns of the completion by `wait` or `done` runs it, once.
    """

    def __init__(self, pending: PendingOperation, finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> None:
        """Waits for the operation at most `timeout` seconds, then runs the final step if nobody has."""
        self._pending.wait(timeout)
        self._finish_once()

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not, after running the final step."""
        is_done = self._pending.done()
        if is_done:
            with suppress(Exception):  # `wait` raises it to the caller
                self.wait(None)
        return is_done

    def source(self) -> int:
        """Returns the rank that sent the message of a completed receive."""
        return self._pending.source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the operation has finished; the final step may still have to run."""
        self._pending.on_done(callback)

    def _finish_once(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
