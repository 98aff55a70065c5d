"""Polls MPI operations: MPI moves data only while it is called.

A thread that waits for an operation tests it repeatedly, at first without a pause and then with longer and longer
ones. A progress thread does this for operations that no thread waits for.
"""

import os
import threading
import time
from typing import Any, Protocol, final

__all__ = ["MpiProgressThread", "PollingPause", "Testable"]

YIELD_TIME_S = 0.001
"""Seconds for which a thread yields between tests, so that ranks may share a core, before it sleeps."""

DATA_TEST_S, DATA_YIELD_TIME_S = 0.00002, 0.0003
"""A test that takes longer than the first has moved data; the thread does not sleep for the second after it."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.00005, 0.005

SCAN_INTERVAL_S = 0.01
"""Seconds after which the progress thread looks for operations that no thread waits for."""

IDLE_TIMEOUT_S = 10.0
"""Seconds without any operation after which the progress thread ends."""


class Testable(Protocol):
    """An operation in flight, which makes progress while it is tested."""

    waiters: int
    """Threads that wait for the operation, and test it meanwhile."""

    def test(self) -> bool:
        """Tests the operation, and returns whether it is done."""


@final
class PollingPause:
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
class MpiProgressThread:
    """Polls the operations in flight that no thread waits for. Owned by the MPI world."""

    def __init__(self) -> None:
        self.abandoned: list[Any] = []
        """Requests that failed or timed out in flight, with their buffers: MPI may still write to these."""
        self._operations: dict[int, Testable] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_closed = False

    def add(self, operation: Testable) -> None:
        """Adds an operation that has been started."""
        self._operations[id(operation)] = operation
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-mpi", daemon=True)
                self._thread.start()

    def remove(self, operation: Testable) -> None:
        """Removes an operation that is done."""
        self._operations.pop(id(operation), None)

    def wake(self) -> None:
        """Has the thread look for operations now."""
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, and waits for it."""
        self._is_closed = True
        self._wake.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        pause, idle_since = PollingPause(), time.perf_counter()
        while not self._is_closed:
            without_waiter = [each for each in list(self._operations.values()) if not each.waiters]
            now = time.perf_counter()
            if without_waiter:
                idle_since = now
                if [each for each in without_waiter if each.test()]:
                    pause = PollingPause()
                pause.pause(now)
                continue
            self._wake.wait(SCAN_INTERVAL_S)
            self._wake.clear()
            with self._lock:
                if not self._operations and now - idle_since > IDLE_TIMEOUT_S:
                    self._thread = None
                    return
