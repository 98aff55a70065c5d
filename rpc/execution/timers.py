"""Threads that run something at its time: the tasks of an agent's control messages, and timeouts of requests."""

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, final

__all__ = ["Deadlines", "DeadlinesFactory", "Scheduler", "SerialThread", "Task"]

LINGER_S = 0.02
"""Seconds that a task which is not urgent waits for others."""

MAX_WAIT_S = 3600.0
"""Seconds of one wait; the operating system refuses waits of centuries."""

MAX_SETTLED_ENTRIES = 1024
"""Entries of settled requests that are kept besides as many as there were live ones last time."""

log = logging.getLogger(__name__)

Task = Callable[[], None]

K = TypeVar("K", bound=int | tuple[int, int])
"""The type of the ids, which tell the order of those whose time is the same."""


class Scheduler(Protocol):
    """Runs tasks one after another, in the order in which they were submitted.

    A task that raises is logged, and the next one runs. Owned by one ControlMessages, which calls `close` once.
    """

    def submit(self, task: Task, *, urgent: bool = True) -> None:
        """Queues a task. May be called from any thread; takes no lock, so finalizers may call it.

        One that is not urgent may wait up to LINGER_S for others.
        """

    def call_later(self, seconds: float, task: Task) -> None:
        """Has a task run after `seconds`. Only tasks may call this."""

    def close(self, seconds: float) -> None:
        """Ends after the queued tasks, and drops those of `call_later`. Waits at most `seconds` for the end."""


@final
class SerialThread:
    """A scheduler on a thread of its own."""

    def __init__(self, name: str, initializer: Task) -> None:
        """Starts the thread, which runs `initializer` first."""
        self._tasks: deque[Task] = deque()
        self._wake_ups: SimpleQueue[float | None] = SimpleQueue()
        """What the thread is woken for: to run the queued tasks at once (0) or in LINGER_S, or to end (None)."""
        self._is_woken = False
        """Whether 0 is in the queue."""
        self._is_lingering = False
        """Whether LINGER_S is in the queue, or that time is not over."""
        self._is_running = False
        """Whether the thread runs the queued tasks."""
        self._timers: list[tuple[float, int, Task]] = []
        """A heap of time of `time.monotonic`, count and task. Used by the thread only."""
        self._count = itertools.count()
        self._initializer = initializer
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task, *, urgent: bool = True) -> None:
        """Queues a task."""
        self._tasks.append(task)
        if self._is_running and threading.get_ident() == self._thread.ident:
            return  # this thread comes to it next
        if urgent and not self._is_woken:
            self._is_woken = True
            self._wake_ups.put(0)
        elif not urgent and not self._is_lingering:
            self._is_lingering = True
            self._wake_ups.put(LINGER_S)

    def call_later(self, seconds: float, task: Task) -> None:
        """Has a task run after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), task))

    def close(self, seconds: float) -> None:
        """Ends the thread after the queued tasks; waits at most `seconds`."""
        self._wake_ups.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        self._initializer()
        seconds: float | None = 0
        while seconds is not None:
            seconds = self._wait()
            if seconds:
                self.call_later(seconds, self._stop_lingering)
            else:
                self._run_queued()

    def _wait(self) -> float | None:
        """Waits until there is something to do, and runs what was to be done later."""
        while True:
            left = self._timers[0][0] - time.monotonic() if self._timers else None
            if left is not None and left <= 0:
                self._run_one(heapq.heappop(self._timers)[2])
                self._run_queued()
                continue
            try:
                seconds = self._wake_ups.get(timeout=left)
            except Empty:
                continue
            if seconds == 0:
                self._is_woken = False  # before the tasks are taken: one that is queued from now on wakes again
            return seconds

    def _stop_lingering(self) -> None:  # `_wait` runs the tasks next
        if self._tasks:
            self.call_later(LINGER_S, self._stop_lingering)  # more may come, which need not wake this thread
        else:
            self._is_lingering = False

    def _run_queued(self) -> None:
        # Again: a finalizer may have queued a task after the last one, before the flag was reset.
        while self._tasks:
            self._is_running = True
            while self._tasks:
                self._run_one(self._tasks.popleft())
            self._is_running = False

    def _run_one(self, task: Task) -> None:
        try:
            task()
        except Exception:
            log.exception("a task of thread %s failed", self._thread.name)


@final
class Deadlines(Generic[K]):
    """Calls a function on its own thread for each id whose time is up.

    An id need not be removed when its request completes: `is_live` tells. No thread wakes up for settled
    requests, and their entries are looked for when there are twice as many entries as live ones last time. So
    memory stays proportional to what is pending, or was at that time.
    """

    def __init__(self, expire: Callable[[K], None], is_live: Callable[[K], bool], name: str) -> None:
        """Starts the thread. `expire`, which must not block, is called with an id whose request is pending."""
        self._expire = expire
        self._is_live = is_live
        self._entries: list[tuple[float, K]] = []
        """A heap of times of `time.monotonic`, and ids."""
        self._max_entries = MAX_SETTLED_ENTRIES
        """The number of entries beyond which those of settled requests are looked for."""
        self._lock = threading.Lock()
        """Guards the entries."""
        self._changed = threading.Condition(self._lock)
        self._wakes_at = math.inf
        """When the thread looks again; later than it does while it is looking."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, identifier: K, seconds: float) -> None:
        """Has an id expire in `seconds` from now."""
        deadline = time.monotonic() + seconds
        with self._lock:
            heapq.heappush(self._entries, (deadline, identifier))
            if deadline < self._wakes_at:
                self._changed.notify()
            if len(self._entries) > self._max_entries:
                self._entries = [entry for entry in self._entries if self._is_live(entry[1])]
                heapq.heapify(self._entries)
                self._max_entries = 2 * len(self._entries) + MAX_SETTLED_ENTRIES

    def close(self) -> None:
        """Ends the thread; nothing expires afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._seconds_left()) > 0:
                    self._changed.wait(left)
                    self._wakes_at = math.inf
                if self._closed:
                    return
                identifier = heapq.heappop(self._entries)[1]
            try:
                self._expire(identifier)
            except Exception:
                log.exception("a request that has timed out cannot be ended")

    def _seconds_left(self) -> float:
        """Returns the time until the first live id expires, and removes those before it. Called with the lock."""
        while self._entries and not self._is_live(self._entries[0][1]):
            heapq.heappop(self._entries)
        now = time.monotonic()
        self._wakes_at = min(self._entries[0][0] if self._entries else math.inf, now + MAX_WAIT_S)
        return self._wakes_at - now


DeadlinesFactory = Callable[[Callable[[Any], None], Callable[[Any], bool], str], Deadlines[Any]]
"""Makes a Deadlines, with the arguments of its constructor."""
