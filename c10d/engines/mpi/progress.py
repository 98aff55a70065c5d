"""Brings MPI operations forward: MPI moves data only while it is called.

Who waits for an operation tests it over and over: fast at first, then with longer and longer pauses. A thread does
it for those that nobody waits for.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, final

__all__ = ["MpiOperation", "MpiProgressThread", "PollingPause"]

YIELD_SECONDS = 0.001
"""For so long tests follow each other with others in between who can run: ranks may be more than cores."""

MOVED_SECONDS, MORE_SECONDS = 0.00002, 0.0003
"""A test that takes so long has moved data, so tests follow each other for so long at least from then on."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.00005, 0.005

UNATTENDED_SECONDS = 0.01
"""After so long at most the thread notices that nobody waits for an operation."""

IDLE_SECONDS = 10.0
"""The thread ends when there has been nothing to do for so long."""


@final
class PollingPause:
    """When to test again: at once, while that has helped a short time ago."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._sleepless = self._since + YIELD_SECONDS

    def pause(self, began: float) -> None:
        """Called after a test that began then, and found nothing done."""
        now = time.perf_counter()
        if now - began > MOVED_SECONDS:
            self._since = now
            self._sleepless = max(self._sleepless, now + MORE_SECONDS)
        if now < self._sleepless:
            os.sched_yield()
        else:
            time.sleep(min(max((now - self._since) / 10, SHORTEST_PAUSE), LONGEST_PAUSE))


@final
class MpiOperation:
    """An MPI request under way. It is a Pending (see engines.base).

    Args:
        progress: that it belongs to.
        request: the mpi4py request.
        limit: tells the error with which to give up now, if it is time to.
        finish: is called with the status once it is done; gives the rank that sent, if any.
        buffers: what must live as long as MPI may touch it.
    """

    def __init__(
        self,
        progress: "MpiProgressThread",
        request: Any,
        status: Any,
        limit: Callable[[], Exception | None],
        finish: Callable[[Any], int],
        explain: Callable[[Exception], Exception],
        buffers: Any,
    ) -> None:
        self._progress = progress
        self._request = request
        self._status = status
        self._limit = limit
        self._finish: Callable[[Any], int] | None = finish
        self._explain = explain
        self._buffers = buffers
        self._testing = threading.Lock()
        self._over = False
        self._source = -1
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.waiters = 0
        progress.add(self)

    def wait(self, timeout: float | None) -> None:
        """Tests it until it is done."""
        end = None if timeout is None else time.perf_counter() + timeout
        patience = None
        self.waiters += 1
        try:
            while True:
                began = time.perf_counter()
                if self.test():
                    break
                if end is not None and began > end:
                    raise TimeoutError
                patience = patience or PollingPause()
                patience.pause(began)
        finally:
            self.waiters -= 1
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Is it over, well or badly?"""
        return self.test()

    def source(self) -> int:
        """Of a receive that is done: the rank that sent."""
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""
        with self._testing:
            if not self._over:
                self._callbacks.append(callback)
                self._progress.hurry()
                return
        callback()

    def test(self) -> bool:
        """Is it over? Called by whoever wants to know, on any thread."""
        if self._over or not self._testing.acquire(blocking=False):
            return self._over
        try:
            if self._over:
                return True
            try:
                if self._request.Test(self._status):
                    assert self._finish is not None
                    self._source = self._finish(self._status)
                    self._over = True
                else:
                    self._error = self._limit()
            except Exception as error:
                self._error = self._explain(error).with_traceback(None)
            if self._error is not None and not self._over:
                self._over = True
                self._progress.abandoned.append((self._request, self._buffers))  # MPI may still write there
            if not self._over:
                return False
            self._finish = self._buffers = self._request = self._status = None
            callbacks, self._callbacks = self._callbacks, []
        finally:
            self._testing.release()
        self._progress.remove(self)
        for callback in callbacks:
            callback()
        return True


@final
class MpiProgressThread:
    """The operations that are under way, and the thread that looks after those that nobody waits for.

    Owned by the MPI world.
    """

    def __init__(self) -> None:
        self.abandoned: list[Any] = []
        """Requests that were given up, with their buffers. MPI cannot forget them."""
        self._operations: dict[int, MpiOperation] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._closed = False

    def add(self, operation: MpiOperation) -> None:
        """Looks after it from now on."""
        self._operations[id(operation)] = operation
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-mpi", daemon=True)
                self._thread.start()

    def remove(self, operation: MpiOperation) -> None:
        """It is over."""
        self._operations.pop(id(operation), None)

    def hurry(self) -> None:
        """There is one that nobody waits for."""
        self._wanted.set()

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._wanted.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        patience, idle_since = PollingPause(), time.perf_counter()
        while not self._closed:
            unattended = [each for each in list(self._operations.values()) if not each.waiters]
            began = time.perf_counter()
            if unattended:
                idle_since = began
                if [each for each in unattended if each.test()]:
                    patience = PollingPause()
                patience.pause(began)
                continue
            self._wanted.wait(UNATTENDED_SECONDS)
            self._wanted.clear()
            with self._lock:
                if not self._operations and began - idle_since > IDLE_SECONDS:
                    self._thread = None
                    return
