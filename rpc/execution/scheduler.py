"""Runs the tasks of an agent's control messages, one after another."""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, final

__all__ = ["Scheduler", "SerialThread", "Task"]

log = logging.getLogger(__name__)

Task = Callable[[], None]


class Scheduler(Protocol):
    """Runs tasks one after another, in the order in which they were submitted.

    A task that raises is logged, and the next one runs. Owned by one ControlMessages, which calls `close` once.
    """

    def submit(self, task: Task) -> None:
        """Queues a task. May be called from any thread; takes no lock, so finalizers may call it."""

    def call_later(self, seconds: float, task: Task) -> None:
        """Has a task run after `seconds`. Only tasks may call this."""

    def close(self, seconds: float) -> None:
        """Ends after the queued tasks, and drops those of `call_later`. Waits at most `seconds` for the end."""


@final
class SerialThread:
    """A scheduler on a thread of its own."""

    def __init__(self, name: str, initializer: Task) -> None:
        """Starts the thread.

        Args:
            name: of the thread.
            initializer: runs first on the thread.
        """
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        """Tasks; None ends the thread."""
        self._timers: list[tuple[float, int, Task]] = []
        """A heap of time of `time.monotonic`, count and task. Used by the thread only."""
        self._count = itertools.count()
        self._initializer = initializer
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queues a task."""
        self._queue.put(task)

    def call_later(self, seconds: float, task: Task) -> None:
        """Has a task run after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), task))

    def close(self, seconds: float) -> None:
        """Ends the thread after the queued tasks; waits at most `seconds`."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        self._initializer()
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:
                log.exception("a task of thread %s failed", self._thread.name)
            del task  # an idle thread keeps no task alive

    def _next(self) -> Task | None:
        """Waits for the next task; returns None at the end."""
        while True:
            left = self._timers[0][0] - time.monotonic() if self._timers else None
            if left is not None and left <= 0:
                return heapq.heappop(self._timers)[2]
            try:
                return self._queue.get(timeout=left)
            except queue.Empty:
                continue
