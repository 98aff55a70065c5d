"""The threads that run incoming calls, and read the sockets that they come from.

An idle thread waits in epoll, for sockets and for tasks from other threads. When a socket is readable, one thread
reads it, and runs what has arrived itself: no other thread has to be woken for a call that comes alone. Meanwhile
another thread waits in epoll. At a high rate, the thread that has read a socket keeps it until it has run what it
has read, because two threads that run short Python functions hold each other up; and it looks at the socket again
before it waits in epoll. The waiting thread then is a watcher: it looks every one to eight milliseconds, and takes
over the socket and what has not begun to run if a function takes longer. So the last watcher does not end while
there is something to watch. A function that waits for another call gives up the socket at once.

A fixed pool deadlocks as soon as calls nest deeper than it has threads. So `size` bounds only threads that can
make progress: a thread that waits for another call does not count, and another thread is started in its place.
Waits that the executor does not know of (for a lock, an event, another library's future) are found by a stall
detector: when no task is taken from the queue although all threads are busy, the detector adds one thread, and
waits longer before it adds each further one.

Libraries tie things to the thread that uses them: child processes that are to die with it (PR_SET_PDEATHSIG,
which torch.multiprocessing sets), event loops, connections, devices. So the first `size` threads, which are all
that torch would have, stay until the executor is closed. Those that have come because others waited end when they
are idle, unless they have child processes.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any, final

from .children import has_children_of_thread
from .interruptions import start_thread
from .poller import OnReady, Poller
from .stalls import MAX_THREADS, StallDetector
from .waiter import Wakeable
from .watching import MAX_WATCHERS, WATCH_INTERVAL_S, Watch

__all__ = ["Executor"]

IDLE_TIMEOUT_S = 10.0
"""Seconds that a thread waits for work before it ends, unless it is to stay."""

MIN_THREADS = 2
"""Threads that stay: one runs what it has read while the other waits in epoll."""

log = logging.getLogger(__name__)
_Task = tuple[Callable[..., None], tuple[Any, ...]]


class _Need(Enum):
    """What has to be started, or woken, for what is queued."""

    NOTHING = auto()
    WAKE_UP = auto()
    THREAD = auto()
    STALL_DETECTOR = auto()


@final
class _DeferredWakeups:
    """What waiting threads wait by. Safe to use from any thread.

    A thread that is woken needs the interpreter, which the thread that wakes it still has. So that one
    wakes it when it has nothing more to do.
    """

    def __init__(self) -> None:
        self.waiters: deque[Wakeable] = deque()
        """Those that are not woken yet. Read without a call, because the executor looks at it all the time."""

    def add(self, waiter: Wakeable) -> None:
        """Has a thread woken by the next `wake_all`."""
        self.waiters.append(waiter)

    def wake_all(self) -> None:
        """Wakes the threads."""
        while self.waiters:
            try:
                waiter = self.waiters.popleft()
            except IndexError:  # another thread has taken it
                return
            waiter.release()


class _ThreadState(threading.local):
    """What the executor keeps about the calling thread."""

    is_worker = False
    """Whether the thread belongs to the executor."""
    blocks = 0
    """How many `blocking` it is in."""
    is_counted = False
    """Whether its task counts against `size`."""
    is_ending = False
    """Whether it is in `call_last`."""
    stays = False
    """Whether it does not end before the executor is closed."""


@final
class _Blocking:
    """What `Executor.blocking` returns. One for all threads: what it has to know is kept by thread."""

    def __init__(self, executor: "Executor") -> None:
        self._executor = executor

    def __enter__(self) -> None:
        executor = self._executor
        thread = executor.here
        executor.poller.stop_reading_here()
        if not thread.is_worker:
            return
        thread.blocks += 1
        if thread.blocks > 1:
            return
        executor._wakeups.wake_all()
        executor.poller.release()
        with executor._lock:
            executor._running -= thread.is_counted
            need = executor._need()
        executor._provide(need)

    def __exit__(self, *_: object) -> None:
        executor = self._executor
        thread = executor.here
        if not thread.is_worker:
            return
        thread.blocks -= 1
        if not thread.blocks:
            with executor._lock:
                executor._running += thread.is_counted


@final
class Executor:
    """Runs tasks on daemon threads of its own. A task must not raise; an exception of one is logged."""

    def __init__(
        self, size: int, name: str, initializer: Callable[[], None] = lambda: None, busy_poll: float = 0.0
    ) -> None:
        """Starts no thread yet.

        Args:
            size: number of threads that can make progress at the same time.
            name: prefix of the threads' names.
            initializer: runs first on every thread.
            busy_poll: see RpcBackendOptions.
        """
        self._size = size
        self._name = name
        self._initializer = initializer
        self._tasks: deque[_Task] = deque()
        self._urgent: deque[_Task] = deque()
        self._lock = threading.Lock()
        """Guards the counts and the queues."""
        self._thread_ended = threading.Condition(self._lock)
        self.here = _ThreadState()
        """What is kept about the calling thread."""
        self._threads = 0
        self._polling = 0
        """Threads in epoll, or about to look at the queues."""
        self._running = 0
        """Threads that run tasks which count against `size`, and are not in `blocking`."""
        self._taken = 0
        """Tasks taken from the queue so far."""
        self._started = 0
        """Threads started so far."""
        self._staying = 0
        """Threads that do not end before the executor is closed."""
        self._stalls = StallDetector(
            f"{name}-stalls", self._lock, self._tasks.__len__, lambda: self._taken, self._provide_threads
        )
        self._closed = False
        self.is_inherited = False
        """Whether this process was forked from that of the executor, and has none of its threads."""
        self.poller = Poller(busy_poll)
        self._watchers = 0
        """Polling threads that look after those which keep a file descriptor."""
        self._watching = Watch(self.poller, self._has_undone)
        self._blocking = _Blocking(self)
        self._wakeups = _DeferredWakeups()

    @property
    def threads(self) -> int:
        """The number of threads."""
        return self._threads

    @property
    def idle(self) -> int:
        """The number of threads that wait for work."""
        return self._polling

    @property
    def queued(self) -> int:
        """The number of tasks that wait for a thread."""
        return len(self._tasks) + len(self._urgent)

    def submit(self, task: Callable[..., None], *args: Any, urgent: bool = False) -> None:
        """Queues a task; drops it after `close`.

        Args:
            task: the task.
            args: its arguments.
            urgent: whether it goes before all others, even if `size` threads are busy. It should be short.
        """
        with self._lock:
            if self._closed:
                return
            (self._urgent if urgent else self._tasks).append((task, args))
            if self.poller.here.is_reading or self.here.is_ending:
                return  # this thread looks at the queues next
            need = self._need()
        if need is not _Need.NOTHING:
            self._provide(need)

    def submit_urgent(self, task: Callable[..., None], *args: Any) -> None:
        """Queues a task that goes before all others: see `submit`."""
        self.submit(task, *args, urgent=True)

    def call_last(self, function: Callable[[], None]) -> None:
        """Calls a function at the end of the calling thread's task. The thread runs what that submits after it."""
        thread = self.here
        thread.is_ending = thread.is_worker and not thread.blocks
        try:
            function()
        finally:
            thread.is_ending = False

    def watch(self, descriptor: int, events: int, on_ready: OnReady) -> None:
        """Has a thread call `on_ready` when a file descriptor is ready, one thread at a time.

        Args:
            descriptor: to watch until `poller.unwatch`, after which whoever owns it closes it.
            events: READABLE or WRITABLE.
            on_ready: see OnReady.
        """
        with self._lock:
            if self._closed:
                return
            self.poller.watch(descriptor, events, on_ready)
            need = self._need()
        self._provide(need)

    def blocking(self) -> AbstractContextManager[None]:
        """Returns a context manager for blocking on other calls; another thread replaces this one meanwhile.

        It does nothing on threads that do not belong to the executor.
        """
        return self._blocking

    def release(self, waiter: Wakeable) -> None:
        """Releases what a thread waits for; a moment later if this thread completes an answer."""
        thread = self.here
        if not thread.is_worker or thread.is_counted or thread.blocks:
            waiter.release()
            return
        self._wakeups.add(waiter)
        if not self._watchers:  # a watcher releases it if this thread does not come to it
            self._wakeups.wake_all()

    def close(self, seconds: float) -> bool:
        """Drops the queued tasks and lets the threads end; waits at most `seconds` for them.

        Returns:
            Whether all threads have ended. A thread that runs user code cannot be ended from outside; as a
            daemon, it does not keep the process from exiting.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
            self._tasks.clear()
            self._urgent.clear()
            self._stalls.close()
            own = 1 if self.here.is_worker else 0  # a thread cannot wait for its own end
            if not self._threads and not was_closed:
                self.poller.close()
            elif self._threads:
                self.poller.wake()
            return self._thread_ended.wait_for(lambda: self._threads <= own, seconds)

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, which has none of the threads: drops the tasks, and has waits raise an error.

        Args:
            why_useless: makes the error.
        """
        self._lock = threading.Lock()
        self._thread_ended = threading.Condition(self._lock)
        self._closed = self.is_inherited = True
        self._tasks.clear()
        self._urgent.clear()
        self._wakeups = _DeferredWakeups()
        self.poller.leave_to_parent(why_useless)

    # With the lock.

    def _need(self) -> _Need:
        """Returns what to do when the lock is released, so that what is queued gets a thread and sockets are read.

        A thread that is started or woken needs the lock at once.
        """
        if not self._polling and not self._closed and self._threads < 2 * MAX_THREADS:
            self._threads += 1
            self._started += 1
            self._polling += 1
            return _Need.THREAD
        if self.poller.kept and not self._watchers:
            return _Need.WAKE_UP  # a thread that becomes a watcher
        if self._urgent or (self._tasks and self._has_runnable()):
            return _Need.WAKE_UP
        if self._tasks:
            if not self._stalls.is_started:
                self._stalls.is_started = True
                return _Need.STALL_DETECTOR
            self._stalls.notify()
        return _Need.NOTHING

    def _has_runnable(self) -> bool:
        """Returns whether a thread may run a task that is queued."""
        is_full = self._running >= self._size + self._stalls.extra or self._threads - self._polling >= MAX_THREADS
        return bool(self._urgent) or (bool(self._tasks) and not is_full)

    # Without the lock, from here on.

    def _provide_threads(self) -> None:
        with self._lock:
            need = self._need()
        self._provide(need)

    def _provide(self, need: _Need) -> None:
        if need is _Need.WAKE_UP:
            self.poller.wake()
        elif need is _Need.THREAD:
            self._start_thread()
        elif need is _Need.STALL_DETECTOR and not self._stalls.start():
            log.warning("cannot start the thread that finds stalled functions")

    def _start_thread(self) -> None:
        """Starts a thread that `_need` has counted."""
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True)
        if not start_thread(thread):  # the existing ones run the task
            with self._lock:
                self._threads -= 1
                self._polling -= 1
            log.warning("cannot start thread %d for incoming calls", self._threads + 1)

    def _run(self) -> None:
        self.here.is_worker = True
        with self._lock:
            self.here.stays = self._staying < max(self._size, MIN_THREADS)
            self._staying += self.here.stays
        self._initializer()
        task = self._next(has_run=False)
        while task is not None:
            function, args = task
            try:
                function(*args)
            except BaseException:
                log.exception("a task of executor %s failed", self._name)
            del task, function, args  # an idle thread keeps no task alive
            task = self._next(has_run=True)

    def _next(self, *, has_run: bool) -> _Task | None:
        """Waits for the next task, and reads sockets meanwhile; returns None if this thread is to end.

        Args:
            has_run: whether the thread has run a task; else it has been started, and counts as polling already.
        """
        poller = self.poller
        is_idle = watches = has_ticked = False
        taken = -1
        while True:
            with self._lock:
                if has_run:
                    has_run = False
                    self._polling += 1
                    self._running -= self.here.is_counted
                self._watchers -= watches
                # A watcher leaves the tasks to a thread that is taking them one after another.
                leaves = has_ticked and bool(poller.kept) and self._taken != taken
                task = None
                self.here.is_counted = False
                if leaves:
                    pass
                elif self._urgent:
                    task = self._urgent.popleft()
                elif (
                    self._tasks
                    and self._running < self._size + self._stalls.extra
                    and self._threads - self._polling < MAX_THREADS
                ):  # as `_has_runnable` says
                    self._running += 1
                    self._taken += 1
                    self.here.is_counted = True
                    task = self._tasks.popleft()
                if task is not None:
                    self._polling -= 1
                elif (self._closed or is_idle or self._polling > self._size) and self._should_end(is_idle=is_idle):
                    break
                watches = task is None and self._watchers < MAX_WATCHERS and (leaves or self._must_watch())
                self._watchers += watches
                taken = self._taken
                is_missing = (
                    self._tasks or self._urgent or not self._polling or (poller.kept and not self._watchers)
                )
                must_look = is_missing and self._must_look_for_threads(leaves=leaves)
                need = self._need() if must_look else _Need.NOTHING
            if need is not _Need.NOTHING:
                self._provide(need)
            if self._wakeups.waiters and (task is None or self.here.is_counted):
                self._wakeups.wake_all()
            if task is not None:
                return task
            if poller.kept and self._polling > 1 and poller.spin(self._has_work):
                has_ticked = False
                continue
            seconds = None if self.here.stays else IDLE_TIMEOUT_S
            has_ticked = not (self._watching.wait(self._poll) if watches else self._poll(seconds))
            is_idle = has_ticked and not watches
            if has_ticked and watches:
                self._wakeups.wake_all()
                poller.take_over(WATCH_INTERVAL_S)
        poller.release()
        return None

    def _has_work(self) -> bool:
        """Returns whether there is something to do for a thread that waits."""
        return bool(self._running or self._tasks or self._urgent or self.poller.handed_over)

    def _has_undone(self) -> bool:
        """Returns whether something is queued that the other threads may have left undone."""
        return bool(self._wakeups.waiters or self._tasks or self._urgent)

    def _must_watch(self) -> bool:
        """Returns whether a thread has to look after the others. Called with the lock."""
        if self.poller.kept or self._wakeups.waiters:
            return True
        return time.monotonic() < self._watching.until

    def _must_look_for_threads(self, *, leaves: bool) -> bool:
        """Returns whether a thread may be missing. Called with the lock."""
        if not self._polling or (self.poller.kept and not self._watchers):
            return True
        if not (self._tasks or self._urgent) or not self._has_runnable():
            return bool(self._tasks)  # of which the stall detector has to know
        # What may run is seen by a watcher in a moment, if this thread does not come to it.
        return not self._watchers and not leaves

    def _should_end(self, *, is_idle: bool) -> bool:
        """Returns whether this thread, which has nothing to run, should end. Called with the lock."""
        is_surplus = is_idle or self._polling > max(self._size, MIN_THREADS)
        # The last watcher goes on: threads that run functions count on it, and those that sleep do not look.
        is_needed = not self._watchers and self._must_watch()
        if not self._closed and (self.here.stays or not is_surplus or is_needed or has_children_of_thread()):
            return False
        self._threads -= 1
        self._polling -= 1
        self._thread_ended.notify_all()
        if self._closed:
            if self._threads:
                self.poller.wake()
            else:
                self.poller.close()
        return True

    def _poll(self, seconds: float | None) -> bool:
        """Waits for a socket or a wake-up, and reads the socket; returns whether there was one.

        Args:
            seconds: how long to wait, None for ever.
        """
        poller = self.poller
        if poller.here.descriptor >= 0:
            poller.release()
        descriptor = poller.wait(seconds)
        if descriptor is None:
            return False
        if descriptor >= 0:
            if poller.is_busy:
                self._watching.extend()
            # Not for a single answer: the thread that waits for it is to have the interpreter for itself.
            if self._watchers and (self._tasks or len(self._urgent) > 1):
                poller.keep(descriptor)
            else:
                poller.watch_again(descriptor)
        return True
