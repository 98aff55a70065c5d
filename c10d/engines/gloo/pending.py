"""Operations of Gloo in flight. The thread that wants a result waits for it in C++."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

from ...torch_types import TorchWork

__all__ = ["GlooCollective", "GlooMessage"]

TranslateError = Callable[[RuntimeError, str, float, float], Exception]
"""Takes Gloo's error, the operation's name, timeout (s) and start (monotonic); returns the error to raise."""

SPIN_S = 0.0004
"""Seconds for which a thread polls, yielding the processor, before it sleeps in C++; waking up takes as long."""


class _GlooOperation:
    """An operation in flight, which may take `timeout` seconds, and torch's Work for it."""

    def __init__(self, translate_error: TranslateError, work: TorchWork, operation: str, timeout: float) -> None:
        self._translate_error = translate_error
        self._work: Any = work  # dropped when done, as it holds the tensors
        self._operation = operation
        self._timeout = timeout
        self._start_time = time.monotonic()
        self._error: Exception | None = None

    def _translated(self, error: RuntimeError) -> Exception:
        translated = self._translate_error(error, self._operation, self._timeout, self._start_time)
        return translated.with_traceback(None)


@final
class GlooCollective(_GlooOperation):
    """A collective in flight, a PendingOperation (c10d/engines/pending.py)."""

    def wait(self, timeout: float | None) -> None:
        """Waits in C++; see PendingOperation.wait."""
        work = self._work
        if work is not None:
            _spin(work)
            try:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(timeout, 0.001)))
            except RuntimeError as error:
                if not work.is_completed():
                    raise TimeoutError from None
                self._error = self._translated(error)
            self._work = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not."""
        work = self._work
        if work is None or work.is_completed():
            with suppress(Exception):  # `wait` raises it again
                self.wait(None)
        return self._work is None

    def peek(self) -> bool:
        """Returns whether the operation has finished, but does not fail the group if it has failed."""
        work = self._work
        return work is None or work.is_completed()

    def source(self) -> int:
        """Raises NotImplementedError, as collectives have no source."""
        raise NotImplementedError

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on one of Gloo's threads when the operation is done, or immediately if it is done."""
        work = self._work
        if work is None:
            callback()
        else:
            work.get_future().add_done_callback(lambda _: callback())


@final
class GlooMessage(_GlooOperation):
    """A send or receive in flight, a PendingOperation (c10d/engines/pending.py).

    Gloo makes progress by itself, but reports the end of a message only to a thread that waits for it. So the
    first `wait` without a timeout waits in C++ itself. A thread is started for that if `done` or `on_done` is
    called before, if `wait` has a timeout, or for a receive from any rank.
    """

    def __init__(self, translate_error: TranslateError, work: TorchWork, operation: str, timeout: float) -> None:
        super().__init__(translate_error, work, operation, timeout)
        self._lock = threading.Lock()
        self._has_waiter = threading.Lock()  # acquired for good by whoever waits in C++, without blocking
        self._is_done = False
        self._source = -1
        self._callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> None:
        """Waits in C++, or for the thread that does; see PendingOperation.wait."""
        # A failure of the group would not wake a thread that waits in C++ for a message from any rank.
        may_wait = not self._is_done and timeout is None and self._operation != "recv_anysource"
        if may_wait and self._has_waiter.acquire(blocking=False):
            self._wait_in_gloo()
        if not self._is_done:
            event = threading.Event()
            self.on_done(event.set)
            if not event.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Returns whether the operation has finished, successfully or not."""
        if not self._is_done:
            self._ensure_waiter()
        return self._is_done

    def peek(self) -> bool:
        """Returns whether the operation is known to have finished. It is not before some thread waits for it."""
        return self._is_done

    def source(self) -> int:
        """Returns the rank that sent the message, once a receive is done."""
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already."""
        with self._lock:
            if not self._is_done:
                self._callbacks.append(callback)
                callback = self._ensure_waiter
        callback()

    def fail(self, error: Exception) -> None:
        """Ends the operation with an error at once, although Gloo may still be working on it."""
        self._finish(error.with_traceback(None))

    def _ensure_waiter(self) -> None:
        """Starts a thread that waits in C++ unless some thread does already."""
        if self._has_waiter.acquire(blocking=False):
            name = f"gradwire-gloo-{self._operation}"
            threading.Thread(target=self._wait_in_gloo, name=name, daemon=True).start()

    def _wait_in_gloo(self) -> None:
        remaining = self._start_time + self._timeout - time.monotonic()
        work = self._work
        if work is None:  # `fail` was called
            return
        try:
            work.wait(timedelta(seconds=max(remaining, 0.001)))
        except RuntimeError as error:
            self._finish(self._translated(error))
            return
        if self._operation != "send":
            self._source = int(work._source_rank())
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        with self._lock:
            if self._is_done:
                return
            self._error = error
            self._work = None  # it holds the tensor
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _spin(work: TorchWork) -> None:
    """Yields the processor until an operation is done, for at most `SPIN_S` seconds."""
    deadline = time.monotonic() + SPIN_S
    while not work.is_completed() and time.monotonic() < deadline:
        os.sched_yield()
