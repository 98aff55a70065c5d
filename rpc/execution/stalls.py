"""Finds out when tasks wait although all threads are busy, and none of them makes progress."""

import threading
from collections.abc import Callable
from typing import final

from .interruptions import start_thread

__all__ = ["MAX_THREADS", "StallDetector"]

MAX_THREADS = 4096
"""Threads that run tasks, or wait in them; beyond that, tasks wait. So calls may nest this deep."""

STALL_TIMEOUT_S = 0.02
"""Seconds in which no task is taken from the queue, after which one thread is added.

The second additional thread takes twice that, the third one three times that, up to MAX_STALL_TIMEOUT_S.
"""

MAX_STALL_TIMEOUT_S = 0.25


@final
class StallDetector:
    """A thread that looks whether tasks are taken from a queue while some wait in it."""

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        queued: Callable[[], int],
        taken: Callable[[], int],
        on_stall: Callable[[], None],
    ) -> None:
        """Starts no thread yet.

        Args:
            name: of the thread.
            lock: guards the queue, and the attributes of the detector.
            queued: returns the number of tasks that wait. Called with the lock.
            taken: returns the number of tasks that have been taken so far. Called with the lock.
            on_stall: called without the lock when one more thread is allowed.
        """
        self.extra = 0
        """The number of additional threads that are allowed since the queue was last empty."""
        self.is_started = False
        self._name = name
        self._lock = lock
        self._queued = queued
        self._taken = taken
        self._on_stall = on_stall
        self._saturated = threading.Condition(lock)
        """Notified when a task is queued for which no thread is free."""
        self._closed = False

    def start(self) -> bool:
        """Starts the thread. Called without the lock, by who has set `is_started` with it.

        Returns:
            Whether it has been started; if not, since the system has a limit, it may be tried again.
        """
        if not start_thread(threading.Thread(target=self._run, name=self._name, daemon=True)):
            self.is_started = False
        return self.is_started

    def notify(self) -> None:
        """Tells the detector that a task waits for a thread. Called with the lock."""
        self._saturated.notify()

    def close(self) -> None:
        """Lets the thread end. Called with the lock."""
        self._closed = True
        self._saturated.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                # While there are tasks, the detector must not wait without a timeout, not even if threads are
                # idle: an idle thread may be about to take a task that waits for the next one.
                if self._closed:
                    return
                if not self._queued():
                    self.extra = 0
                    self._saturated.wait()
                    continue
                taken = self._taken()
                stall = min(MAX_STALL_TIMEOUT_S, STALL_TIMEOUT_S * (self.extra + 1))
                self._saturated.wait_for(lambda: self._closed, stall)
                if self._closed or not self._queued() or self._taken() != taken:
                    continue
                if self.extra >= MAX_THREADS:
                    continue
                self.extra += 1
            self._on_stall()
