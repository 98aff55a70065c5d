"""Where the tasks of an agent's control messages run, one after another."""

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
    """Runs tasks one after another, in the order in which they come. A task that raises is logged.

    Owned by one ControlMessages, which calls `close` once.
    """

    def submit(self, task: Task) -> None:
        """Has a task run after those that came before. Takes no lock, so finalizers may call it."""

    def call_later(self, seconds: float, task: Task) -> None:
        """Has a task run in `seconds`. Only tasks call this."""

    def close(self, seconds: float) -> None:
        """Ends after the tasks that came before; waits for that for at most `seconds`. Drops what is not due."""


@final
class SerialThread:
    """A scheduler on a thread of its own."""

    def __init__(self, name: str, initializer: Task) -> None:
        """Starts the thread, which runs `initializer` first."""
        self._todo: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._later: list[tuple[float, int, Task]] = []
        self._count = itertools.count()
        self._initializer = initializer
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Has a task run."""
        self._todo.put(task)

    def call_later(self, seconds: float, task: Task) -> None:
        """Has a task run in `seconds`."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._count), task))

    def close(self, seconds: float) -> None:
        """Ends the thread."""
        self._todo.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        self._initializer()
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:
                log.exception("a task of %s failed", self._thread.name)
            del task  # a waiting thread keeps nothing of its last task alive

    def _next(self) -> Task | None:
        """The next task; None at the end."""
        while True:
            left = self._later[0][0] - time.monotonic() if self._later else None
            if left is not None and left <= 0:
                return heapq.heappop(self._later)[2]
            try:
                return self._todo.get(timeout=left)
            except queue.Empty:
                continue
