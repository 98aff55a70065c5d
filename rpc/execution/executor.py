"""The threads that run incoming calls.

A fixed pool deadlocks as soon as calls nest deeper than it has threads. So `size` bounds only threads that can
make progress: a thread that waits for another call does not count, and another thread is started in its place.
Waits that the executor does not know of (for a lock, an event, another library's future) are found by a stall
detector: when no task is taken from the queue although all threads are busy, the detector adds one thread, and
waits longer before it adds each further one. Threads beyond `size` end when they run out of work.
"""

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, final

__all__ = ["Executor"]

STALL_TIMEOUT_S = 0.02
"""Seconds in which no task is taken from the queue, after which one thread is added.

The second additional thread takes twice that, the third one three times that, up to MAX_STALL_TIMEOUT_S.
"""

MAX_STALL_TIMEOUT_S = 0.25

IDLE_TIMEOUT_S = 10.0
"""Seconds that a thread waits for work before it ends, unless it is the last one."""

log = logging.getLogger(__name__)

T = TypeVar("T")

_QueuedTask = tuple[Callable[..., None], tuple[Any, ...]]


@final
class Executor:
    """Runs tasks on daemon threads of its own. A task must not raise; an exception of one is logged."""

    def __init__(self, size: int, name: str, initializer: Callable[[], None] = lambda: None) -> None:
        """Starts no thread yet.

        Args:
            size: number of threads that can make progress at the same time.
            name: prefix of the threads' names.
            initializer: runs first on every thread.
        """
        self._size = size
        self._name = name
        self._initializer = initializer
        self._tasks: deque[_QueuedTask] = deque()
        self._lock = threading.Lock()
        """Guards all counts and the queue."""
        self._has_work = threading.Condition(self._lock)
        self._saturated = threading.Condition(self._lock)
        """Notified when a task is queued for which no thread is free: wakes the stall detector."""
        self._thread_ended = threading.Condition(self._lock)
        self._local = threading.local()
        """Of each thread: `is_worker`, whether it belongs to this executor; `is_blocked`, in `blocking`."""
        self._threads = 0
        self._idle = 0
        self._blocked = 0
        self._extra = 0
        """Threads beyond `size` that the stall detector has added since the queue was last empty."""
        self._taken = 0
        """Tasks taken from the queue so far."""
        self._started = 0
        """Threads started so far."""
        self._stall_detector: threading.Thread | None = None
        self._closed = False

    @property
    def threads(self) -> int:
        """The number of threads."""
        return self._threads

    @property
    def idle(self) -> int:
        """The number of threads that wait for a task."""
        return self._idle

    @property
    def queued(self) -> int:
        """The number of tasks that wait for a thread."""
        return len(self._tasks)

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Queues a task; drops it after `close`."""
        with self._lock:
            if self._closed:
                return
            self._tasks.append((task, args))
            if self._idle >= len(self._tasks):
                self._has_work.notify()
            else:
                self._add_thread()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Context manager for blocking on other calls; another thread replaces the blocked one meanwhile.

        Does nothing on threads that do not belong to the executor.
        """
        if not getattr(self._local, "is_worker", False) or getattr(self._local, "is_blocked", False):
            yield
            return
        self._local.is_blocked = True
        with self._lock:
            self._blocked += 1
            if len(self._tasks) > self._idle:
                self._add_thread()
        try:
            yield
        finally:
            self._local.is_blocked = False
            with self._lock:
                self._blocked -= 1

    def wait(self, future: "concurrent.futures.Future[T]") -> T:
        """Returns the result of a future that other calls complete, or raises its exception."""
        with self.blocking():
            return future.result()

    def close(self, seconds: float) -> bool:
        """Drops the queued tasks and lets the threads end; waits at most `seconds` for them.

        Returns:
            Whether all threads have ended. A thread that runs user code cannot be ended from outside; as a
            daemon, it does not keep the process from exiting.
        """
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._has_work.notify_all()
            self._saturated.notify_all()
            own = 1 if getattr(self._local, "is_worker", False) else 0  # a thread cannot wait for its own end
            return self._thread_ended.wait_for(lambda: self._threads <= own, seconds)

    def _add_thread(self) -> None:
        """Starts a thread if there may be one more, else wakes the stall detector. Called with the lock."""
        if self._threads - self._blocked < self._size + self._extra:
            self._start_thread()
        elif self._stall_detector is None:
            self._stall_detector = threading.Thread(
                target=self._detect_stalls, name=f"{self._name}-stalls", daemon=True
            )
            self._stall_detector.start()
        else:
            self._saturated.notify()

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        self._threads += 1
        try:
            thread.start()
        except RuntimeError:  # the system's limit; the existing threads run the task
            self._threads -= 1
            log.warning("cannot start thread %d for incoming calls", self._threads + 1)

    def _run(self) -> None:
        self._local.is_worker = True
        self._initializer()
        while (task := self._next()) is not None:
            function, args = task
            try:
                function(*args)
            except BaseException:
                log.exception("a task of executor %s failed", self._name)
            del task, function, args  # an idle thread keeps no task alive

    def _next(self) -> _QueuedTask | None:
        """Waits for the next task; returns None if this thread is to end, after which it is not counted."""
        with self._lock:
            self._idle += 1
            try:
                while not self._tasks:
                    if self._should_end():
                        self._threads -= 1
                        self._thread_ended.notify_all()
                        return None
                self._taken += 1
                return self._tasks.popleft()
            finally:
                self._idle -= 1

    def _should_end(self) -> bool:
        """Waits for work; returns whether an idle thread should end. Called with the lock."""
        if self._closed or self._threads - self._blocked > self._size:
            return True
        was_notified = self._has_work.wait(IDLE_TIMEOUT_S)
        return self._closed or (not was_notified and not self._tasks and self._threads > 1)

    def _detect_stalls(self) -> None:
        with self._lock:
            while not self._closed:
                # While there are tasks, the detector must not wait without a timeout, not even if threads are
                # idle: an idle thread may be about to take a task that waits for the next one.
                if not self._tasks:
                    self._extra = 0
                    self._saturated.wait()
                    continue
                taken = self._taken
                stall = min(MAX_STALL_TIMEOUT_S, STALL_TIMEOUT_S * (self._extra + 1))
                self._saturated.wait_for(lambda: self._closed, stall)
                if not self._closed and self._tasks and not self._idle and self._taken == taken:
                    self._extra += 1
                    self._start_thread()
