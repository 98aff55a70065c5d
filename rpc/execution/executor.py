"""The threads that run incoming calls.

A fixed pool deadlocks as soon as calls nest deeper than it has threads. So `size` counts only threads that
can make progress: one that waits for another call does not count, and another is started in its place.
Waits that the executor is not told of (a lock, an event, a foreign future) are found by a watch: when the
queue stands still although all threads are taken, it adds one thread, and is slower to add each further one.
Threads beyond `size` end when they run out of work.
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
LONGEST_STALL_SECONDS = 0.25
"""How long the queue stands still before the first thread is added; the next takes twice that, then three times
that, up to the longest."""

IDLE_SECONDS = 10.0
"""How long a thread beyond the first waits for work before it ends."""

log = logging.getLogger(__name__)

T = TypeVar("T")

Task = tuple[Callable[..., None], tuple[Any, ...]]


@final
class Executor:
    """Runs tasks on daemon threads of its own. Tasks must not raise; one that does is logged."""

    def __init__(self, size: int, name: str, initializer: Callable[[], None] = lambda: None) -> None:
        """Starts no thread yet.

        Args:
            size: threads that may make progress at the same time.
            name: prefix of the threads' names.
            initializer: runs first on every thread.
        """
        self._size = size
        self._name = name
        self._initializer = initializer
        self._tasks: deque[Task] = deque()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._saturated = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._mine = threading.local()
        self._threads = 0
        self._idle = 0
        self._blocked = 0
        self._surplus = 0
        self._taken = 0
        self._started = 0
        self._watch: threading.Thread | None = None
        self._closed = False

    @property
    def threads(self) -> int:
        """How many threads there are now."""
        return self._threads

    @property
    def idle(self) -> int:
        """How many of them wait for work."""
        return self._idle

    @property
    def queued(self) -> int:
        """How many tasks wait for a thread."""
        return len(self._tasks)

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        """Queues a task. After `close` it is dropped."""
        with self._lock:
            if self._closed:
                return
            self._tasks.append((task, args))
            if self._idle >= len(self._tasks):
                self._work.notify()
            else:
                self._grow()

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around a wait for other calls. Does nothing on threads that are not the executor's."""
        if not getattr(self._mine, "member", False) or getattr(self._mine, "blocked", False):
            yield
            return
        self._mine.blocked = True
        with self._lock:
            self._blocked += 1
            if len(self._tasks) > self._idle:
                self._grow()
        try:
            yield
        finally:
            self._mine.blocked = False
            with self._lock:
                self._blocked -= 1

    def wait(self, future: "concurrent.futures.Future[T]") -> T:
        """Waits for other calls to bring a future its result."""
        with self.blocking():
            return future.result()

    def close(self, seconds: float) -> bool:
        """Drops what is queued and lets the threads end; waits for them for at most `seconds`.

        Returns:
            Have they all ended? One that runs user code cannot be ended from outside; being a daemon it
            does not keep the process.
        """
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._work.notify_all()
            self._saturated.notify_all()
            mine = 1 if getattr(self._mine, "member", False) else 0
            return self._drained.wait_for(lambda: self._threads <= mine, seconds)

    def _grow(self) -> None:
        """Starts a thread if one is due, else has the watch look after the queue. Called with the lock."""
        if self._threads - self._blocked < self._size + self._surplus:
            self._spawn()
        elif self._watch is None:
            self._watch = threading.Thread(target=self._look_for_stalls, name=f"{self._name}-watch", daemon=True)
            self._watch.start()
        else:
            self._saturated.notify()

    def _spawn(self) -> None:
        self._started += 1
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        self._threads += 1
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads: those there are must do
            self._threads -= 1
            log.warning("cannot start thread %d for incoming calls", self._threads + 1)

    def _run(self) -> None:
        self._mine.member = True
        self._initializer()
        while (task := self._next()) is not None:
            function, args = task
            try:
                function(*args)
            except BaseException:
                log.exception("a task of %s failed", self._name)
            del task, function, args  # an idle thread keeps nothing of its last task alive

    def _next(self) -> Task | None:
        """The next task; None if the thread is to end, which is then no longer counted."""
        with self._lock:
            self._idle += 1
            try:
                while not self._tasks:
                    surplus = self._threads - self._blocked > self._size
                    waited_in_vain = not surplus and not self._closed and not self._work.wait(IDLE_SECONDS)
                    if self._closed or surplus or (waited_in_vain and not self._tasks and self._threads > 1):
                        self._threads -= 1
                        self._drained.notify_all()
                        return None
                self._taken += 1
                return self._tasks.popleft()
            finally:
                self._idle -= 1

    def _look_for_stalls(self) -> None:
        with self._lock:
            while not self._closed:
                # Not to sleep for good while there are tasks, idle threads or not: an idle thread may be
                # about to take one and wait in it for the next.
                if not self._tasks:
                    self._surplus = 0
                    self._saturated.wait()
                    continue
                taken = self._taken
                stall = min(LONGEST_STALL_SECONDS, STALL_TIMEOUT_S * (self._surplus + 1))
                self._saturated.wait_for(lambda: self._closed, stall)
                if not self._closed and self._tasks and not self._idle and self._taken == taken:
                    self._surplus += 1
                    self._spawn()
