"""Operations of Gloo that are under way. They are waited for in C++, by the thread that wants the result."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

from ...torch_types import TorchWork

__all__ = ["GlooCollective", "GlooMessage"]

Explain = Callable[[RuntimeError, str, float, float], Exception]
"""What an error means: of which operation, how long it may take in seconds, and when (monotonic) it began."""

SPIN_SECONDS = 0.0004
"""So long a thread that waits for a collective lets others run before it sleeps: to be woken takes long, too."""


@final
class GlooCollective:
    """A collective under way."""

    def __init__(self, explain: Explain, work: TorchWork, operation: str, seconds: float) -> None:
        self._explain = explain
        self._work: TorchWork | None = work  # it holds the tensors
        self._operation = operation
        self._seconds = seconds
        self._begun = time.monotonic()
        self._error: Exception | None = None

    def wait(self, timeout: float | None) -> None:
        """Waits in C++."""
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
                explained = self._explain(error, self._operation, self._seconds, self._begun)
                self._error = explained.with_traceback(None)
            self._work = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Is it over, well or badly?"""
        work = self._work
        if work is None or work.is_completed():
            with suppress(Exception):  # which `wait` raises
                self.wait(None)
        return self._work is None

    def source(self) -> int:
        """Only receives have one."""
        raise NotImplementedError

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called by one of Gloo's threads."""
        work = self._work
        if work is None:
            callback()
        else:
            work.get_future().add_done_callback(lambda _: callback())


@final
class GlooMessage:
    """A message under way. Gloo makes progress with it by itself, but says that it is over only to who waits."""

    def __init__(self, explain: Explain, work: TorchWork, operation: str, seconds: float) -> None:
        self._explain = explain
        self._work: Any = work
        self._operation = operation
        self._seconds = seconds
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._over = False
        self._waited_for = False
        self._source = -1
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    def wait(self, timeout: float | None) -> None:
        """Waits in C++, or for who does that."""
        # A failure would not wake who waits in C++ for a message from anyone.
        if not self._over and timeout is None and self._operation != "recv_anysource":
            with self._lock:
                mine, self._waited_for = not self._waited_for, True
            if mine:
                self._finish()
        if not self._over:
            over = threading.Event()
            self.on_done(over.set)
            if not over.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Is it over, well or badly?"""
        if not self._over:
            self._have_waited_for()
        return self._over

    def source(self) -> int:
        """The rank that sent."""
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                callback = self._have_waited_for
        callback()

    def give_up(self, error: Exception) -> None:
        """Ends it with an error, whatever Gloo does."""
        self._end(error.with_traceback(None))

    def _have_waited_for(self) -> None:
        with self._lock:
            if self._waited_for:
                return
            self._waited_for = True
        threading.Thread(target=self._finish, name=f"gradwire-gloo-{self._operation}", daemon=True).start()

    def _finish(self) -> None:
        left = self._begun + self._seconds - time.monotonic()
        work = self._work
        if work is None:  # it was given up
            return
        try:
            work.wait(timedelta(seconds=max(left, 0.001)))
        except RuntimeError as error:
            self.give_up(self._explain(error, self._operation, self._seconds, self._begun))
            return
        if self._operation != "send":
            self._source = int(work._source_rank())
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._over:
                return
            self._error = error
            self._work = None  # it holds the tensor
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _spin(work: TorchWork) -> None:
    """Returns soon after an operation is over, or after a while."""
    end = time.monotonic() + SPIN_SECONDS
    while not work.is_completed() and time.monotonic() < end:
        os.sched_yield()
