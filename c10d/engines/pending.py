"""Operations in flight: the contract of those that engines return, and operations made of others."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, final

from ...errors import ProcessGroupError

__all__ = ["CombinedOperation", "CompletedOperation", "OperationWithFinalStep", "PendingOperation", "peek"]


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
        """Returns whether the operation has finished, successfully or not.

        Does not block, not even on a lock: it may run in a signal handler of a thread that holds the lock.
        """

    def source(self) -> int:
        """Returns the rank that sent the message. Defined for receives that are done."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already.

        The callback may run on any thread, must not raise, and must not wait for other operations.
        """


def peek(pending: PendingOperation) -> bool:
    """Returns whether an operation is known to have finished, for tools that must not affect it.

    Operations whose `done` starts a thread or handles an error have a method `peek` for this, and so have
    operations made of others. Those without it are asked by `done`.
    """
    ask: Callable[[], bool] = getattr(pending, "peek", pending.done)
    return ask()


@final
class CombinedOperation:
    """Several operations as one, which is done when all of them are."""

    def __init__(self, parts: Sequence[PendingOperation]) -> None:
        self._parts = parts

    def wait(self, timeout: float | None) -> None:
        """Waits for each part in turn, at most `timeout` seconds in all. Raises the first error."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            part.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def done(self) -> bool:
        """Returns whether all parts have finished, successfully or not."""
        return all(part.done() for part in self._parts)

    def peek(self) -> bool:
        """Returns whether all parts are known to have finished; see `peek`."""
        return all(peek(part) for part in self._parts)

    def source(self) -> int:
        """Returns the rank that sent the message of the last part, a receive."""
        return self._parts[-1].source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the last part has finished."""
        finished = itertools.count(1)  # no two threads get the same number

        def on_part_done() -> None:
            if next(finished) == len(self._parts):
                callback()

        for part in self._parts:
            part.on_done(on_part_done)


@final
class CompletedOperation:
    """An operation that has succeeded already; a receive has a source, the rank that sent."""

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
            If it raises an error, the operation has failed with that error.
    """

    def __init__(self, pending: PendingOperation, finish: Callable[[], None]) -> None:
        self._pending = pending
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> None:
        """Waits for the operation at most `timeout` seconds, then runs the final step if nobody has."""
        self._pending.wait(timeout)
        with self._lock:
            self._finish_once()

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not, after running the final step.

        Returns False while another call runs the final step.
        """
        if not self._pending.done():
            return False
        with suppress(Exception):  # `wait` raises it to the caller
            self._pending.wait(None)
            if self._finish is not None:
                if not self._lock.acquire(blocking=False):
                    return False
                try:
                    self._finish_once()
                finally:
                    self._lock.release()
        return True

    def peek(self) -> bool:
        """Returns whether the operation is known to have finished, except for its final step; see `peek`."""
        return peek(self._pending)

    def source(self) -> int:
        """Returns the rank that sent the message of a completed receive."""
        return self._pending.source()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, when the operation has finished; the final step may still have to run."""
        self._pending.on_done(callback)

    def _finish_once(self) -> None:
        """Runs the final step unless it has run; raises the error with which it has failed. Needs the lock."""
        if self._finish is not None:
            try:
                self._finish()
            except BaseException as error:
                # A KeyboardInterrupt is raised once, but the outputs stay incomplete.
                interrupted = ProcessGroupError("the operation was interrupted before it had written its outputs")
                self._error = error if isinstance(error, Exception) else interrupted
                raise
            finally:
                self._finish = None  # it refers to the tensors
        if self._error is not None:
            raise self._error.with_traceback(None)  # each raise adds to the traceback, whose frames keep tensors
