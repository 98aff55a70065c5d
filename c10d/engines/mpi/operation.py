"""Operations of MPI in flight, and what polls them: MPI moves data only while it is called.

An operation is started without waiting and tested until it is done, so that it can time out and be failed. MPI
cannot cancel it then: the process keeps the memory of its tensors until it ends, as MPI may still write to it.

A thread that waits for an operation tests it repeatedly, at first without a pause and then with longer and longer
ones. A progress thread does this for operations that no thread waits for.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

from ....errors import CollectiveTimeoutError, ProcessGroupError
from ..base import Engine
from ..polling_thread import PollingThread

__all__ = ["MpiOperation", "MpiProgress"]

YIELD_TIME_S = 0.001
"""Seconds for which a thread yields between tests, so that ranks may share a core, before it sleeps."""

DATA_TEST_S, DATA_YIELD_TIME_S = 0.00002, 0.0003
"""A test that takes longer than the first has moved data; the thread does not sleep for the second after it."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.00005, 0.005

SCAN_INTERVAL_S = 0.01
"""Seconds after which the progress thread looks for operations that no thread waits for."""


@final
class _PollingPause:
    """Pauses between the tests of an operation, for longer the longer nothing has happened."""

    def __init__(self) -> None:
        self._last_progress = time.perf_counter()
        self._yield_until = self._last_progress + YIELD_TIME_S

    def pause(self, test_start: float) -> None:
        """Pauses after a test that began at `test_start` (time.perf_counter) and found the operation in flight."""
        now = time.perf_counter()
        if now - test_start > DATA_TEST_S:
            self._last_progress = now
            self._yield_until = max(self._yield_until, now + DATA_YIELD_TIME_S)
        if now < self._yield_until:
            os.sched_yield()
        else:
            time.sleep(min(max((now - self._last_progress) / 10, MIN_PAUSE_S), MAX_PAUSE_S))


@final
class MpiProgress:
    """The operations of this process that are in flight.

    in_flight: by their id.
    abandoned: requests that failed or timed out in flight, with their buffers: MPI may still write to these.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi: Final = mpi
        self.in_flight: dict[int, MpiOperation] = {}
        self.abandoned: list[Any] = []
        self.thread: Final = PollingThread("gradwire-mpi", self._poll, SCAN_INTERVAL_S)
        self._pause = _PollingPause()

    def _poll(self) -> float | None:
        """Tests the operations that no thread waits for."""
        without_waiter = [each for each in list(self.in_flight.values()) if not each.waiters]
        if not without_waiter:
            return None
        test_start = time.perf_counter()
        if [each for each in without_waiter if each.done()]:
            self._pause = _PollingPause()
        self._pause.pause(test_start)
        return 0.0


@final
class MpiOperation:
    """An MPI request in flight, a PendingOperation (c10d/engines/pending.py).

    Args:
        engine: that has started it.
        progress: tests it while no thread waits for it.
        request: the mpi4py Request.
        name, timeout: of the operation.
        buffers: kept alive as long as MPI may access them.
        finish: runs when the request has succeeded, before the operation is done.
        expected_bytes: size of the message, for receives only.
    """

    def __init__(
        self,
        engine: Engine,
        progress: MpiProgress,
        request: Any,
        *,
        name: str,
        timeout: float,
        buffers: Any,
        finish: Callable[[], None] | None,
        expected_bytes: int | None,
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._request = request
        self._name = name
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._buffers = buffers
        self._finish = finish
        self._expected_bytes = expected_bytes
        self._status = None if expected_bytes is None else progress.mpi.Status()
        self._testing = threading.Lock()
        self._is_done = False
        self._source = -1
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self.waiters = 0
        """Threads that wait for the operation, and test it meanwhile."""
        progress.in_flight[id(self)] = self
        progress.thread.start()

    def wait(self, timeout: float | None) -> None:
        """Tests the operation until it is done, see PendingOperation.wait."""
        deadline = None if timeout is None else time.perf_counter() + timeout
        pause = None
        self.waiters += 1
        try:
            while True:
                test_start = time.perf_counter()
                if self.done():
                    break
                if deadline is not None and test_start > deadline:
                    raise TimeoutError
                pause = pause or _PollingPause()
                pause.pause(test_start)
        finally:
            self.waiters -= 1
            if not self._is_done:  # as after a timeout: nobody tests the operation now
                self._progress.thread.start()
        if self._error is not None:
            raise self._error

    def source(self) -> int:
        """Returns the rank that sent the message."""
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the operation is done, or immediately if it is done already."""
        with self._testing:
            if not self._is_done:
                self._callbacks.append(callback)
                self._progress.thread.wake()
                return
        callback()

    def done(self) -> bool:
        """Tests the operation, unless another thread does so at the moment, and returns whether it is done."""
        if self._is_done or not self._testing.acquire(blocking=False):
            return self._is_done
        try:
            if self._is_done:
                return True
            self._advance()
            if not self._is_done:
                return False
            self._finish = self._buffers = self._request = self._status = None
            callbacks, self._callbacks = self._callbacks, []
        finally:
            self._testing.release()
        self._progress.in_flight.pop(id(self), None)
        for callback in callbacks:
            callback()
        return True

    def _advance(self) -> None:
        """Calls MPI_Test, and finishes the operation if the request is complete, has failed or has timed out."""
        try:
            if self._request.Test(self._status):
                self._complete()
                self._is_done = True
                return
            if self._engine.failure is None and time.monotonic() > self._deadline:
                self._engine.fail_group(CollectiveTimeoutError(self._name, self._timeout))
            self._error = self._engine.failure
        except Exception as error:
            if isinstance(error, self._progress.mpi.Exception):
                error = ProcessGroupError(f"{self._name} failed in MPI: {error}")
            self._error = self._engine.fail_group(error).with_traceback(None)
        if self._error is not None:
            self._is_done = True
            self._progress.abandoned.append((self._request, self._buffers))

    def _complete(self) -> None:
        """Runs `finish`; checks the size of a received message, and notes its source."""
        if self._finish is not None:
            self._finish()
        if self._status is None:
            return
        source = int(self._status.Get_source())
        received = self._status.Get_count(self._progress.mpi.BYTE)
        if received != self._expected_bytes:
            raise ProcessGroupError(
                f"recv expects {self._expected_bytes} bytes, but rank {source} sent {received}: send and "
                "receive tensors of one size and dtype"
            )
        self._source = source
