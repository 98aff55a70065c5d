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

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

from .interruptions import start_thread
from .poller import MAX_WATCHERS, WATCH_INTERVAL_S, OnReady, Poller, Wakeable, Watch

__all__ = ["Executor", "SerialCalls"]

T = TypeVar("T")

IDLE_TIMEOUT_S = 10.0
"""Seconds that a thread waits for work before it ends, unless it is to stay."""

MIN_THREADS = 2
"""Threads that stay: one runs what it has read while the other waits in epoll."""

MAX_THREADS = 4096
"""Threads that run tasks, or wait in them; beyond that, tasks wait. So calls may nest this deep."""

STALL_TIMEOUT_S = 0.02
"""Seconds in which no task is taken from the queue, after which one thread is added.

The second additional thread takes twice that, the third one three times that, up to MAX_STALL_TIMEOUT_S.
"""

MAX_STALL_TIMEOUT_S = 0.25

WNOTHREAD = 0x20000000
WALL = 0x40000000
"""Options of waitid(2) without names in Python: only children of this thread, and those made by clone(2) too."""

log = logging.getLogger(__name__)
_Task = tuple[Callable[..., None], tuple[Any, ...]]


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
        executor._wake_all()
        executor.poller.release()
        with executor._lock:
            executor._running -= thread.is_counted
            need = executor._need()
        if need is not None:
            need()

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
        """Starts no thread yet. `size` of them can make progress at a time; `initializer` runs first on each."""
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
        self._finds_stalls = False
        """Whether a thread looks for stalls."""
        self._saturated = threading.Condition(self._lock)
        """Notified when a task is queued for which no thread is free."""
        self._extra = 0
        """The number of additional threads that are allowed since the queue was last empty."""
        self._closed = False
        self.is_inherited = False
        """Whether this process was forked from that of the executor, and has none of its threads."""
        self.poller = Poller(busy_poll)
        self._watchers = 0
        """Polling threads that look after those which keep a file descriptor."""
        self._watch = Watch(self.poller, self._has_undone)
        self._to_wake: deque[Wakeable] = deque()
        """What threads wait by that are to be woken. A thread that is woken needs the interpreter, which the one
        that wakes it still has: so that one wakes it when it has nothing more to do."""
        self._blocking = _Blocking(self)

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

        An urgent one goes before all others, even if `size` threads are busy. It should be short.
        """
        with self._lock:
            if self._closed:
                return
            (self._urgent if urgent else self._tasks).append((task, args))
            if self.poller.here.is_reading or self.here.is_ending:
                return  # this thread looks at the queues next
            need = self._need()
        if need is not None:
            need()

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
        """Has a thread call `on_ready` when a file descriptor is READABLE or WRITABLE, one thread at a time.

        That lasts until `poller.unwatch`, after which whoever owns the descriptor closes it.
        """
        with self._lock:
            if self._closed:
                return
            self.poller.watch(descriptor, events, on_ready)
            need = self._need()
        if need is not None:
            need()

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
        self._to_wake.append(waiter)
        if not self._watchers:  # a watcher releases it if this thread does not come to it
            self._wake_all()

    def close(self, seconds: float) -> bool:
        """Drops the queued tasks and lets the threads end. Waits at most `seconds`; returns whether all are gone.

        A thread that runs user code cannot be ended from outside; as a daemon, it does not keep the process alive.
        """
        with self._lock:
            was_closed, self._closed = self._closed, True
            self._tasks.clear()
            self._urgent.clear()
            self._saturated.notify_all()
            own = 1 if self.here.is_worker else 0  # a thread cannot wait for its own end
            if not self._threads and not was_closed:
                self.poller.close()
            elif self._threads:
                self.poller.wake()
            return self._thread_ended.wait_for(lambda: self._threads <= own, seconds)

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, which has none of the threads: drops the tasks, and has waits raise an error."""
        self._lock = threading.Lock()
        self._thread_ended = threading.Condition(self._lock)
        self._saturated = threading.Condition(self._lock)
        self._closed = self.is_inherited = True
        self._tasks.clear()
        self._urgent.clear()
        self._to_wake.clear()
        self.poller.leave_to_parent(why_useless)

    # With the lock.

    def _need(self) -> Callable[[], None] | None:
        """Returns what to call without the lock, so that what is queued gets a thread and sockets are read.

        A thread that is started or woken needs the lock at once.
        """
        if not self._polling and not self._closed and self._threads < 2 * MAX_THREADS:
            self._threads += 1
            self._started += 1
            self._polling += 1
            return self._start_thread
        if self.poller.kept and not self._watchers:
            return self.poller.wake  # a thread that becomes a watcher
        if self._urgent or (self._tasks and self._has_runnable()):
            return self.poller.wake
        if self._tasks:
            if not self._finds_stalls:
                self._finds_stalls = True
                return self._start_stall_detector
            self._saturated.notify()
        return None

    def _has_runnable(self) -> bool:
        """Returns whether a thread may run a task that is queued."""
        is_full = self._running >= self._size + self._extra or self._threads - self._polling >= MAX_THREADS
        return bool(self._urgent) or (bool(self._tasks) and not is_full)

    # Without the lock, from here on.

    def _wake_all(self) -> None:
        """Wakes the threads that are to be woken."""
        while self._to_wake:
            try:
                waiter = self._to_wake.popleft()
            except IndexError:  # another thread has taken it
                return
            waiter.release()

    def _start_stall_detector(self) -> None:
        """Starts the thread that `_need` has noted."""
        if not start_thread(threading.Thread(target=self._find_stalls, name=f"{self._name}-stalls", daemon=True)):
            self._finds_stalls = False  # it may be tried again
            log.warning("cannot start the thread that finds stalled functions")

    def _find_stalls(self) -> None:
        """Allows one more thread whenever tasks wait, all threads are busy, and none of them makes progress."""
        while True:
            with self._lock:
                # While there are tasks, this must not wait without a timeout, not even if threads are idle: an
                # idle thread may be about to take a task that waits for the next one.
                if self._closed:
                    return
                if not self._tasks:
                    self._extra = 0
                    self._saturated.wait()
                    continue
                taken = self._taken
                self._saturated.wait_for(
                    lambda: self._closed, min(MAX_STALL_TIMEOUT_S, STALL_TIMEOUT_S * (self._extra + 1))
                )
                if self._closed or not self._tasks or self._taken != taken or self._extra >= MAX_THREADS:
                    continue
                self._extra += 1
                need = self._need()
            if need is not None:
                need()

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

        A thread that has run no task has just been started, and counts as polling already.
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
                    and self._running < self._size + self._extra
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
                need = self._need() if must_look else None
            if need is not None:
                need()
            if self._to_wake and (task is None or self.here.is_counted):
                self._wake_all()
            if task is not None:
                return task
            if poller.kept and self._polling > 1 and poller.spin(self._has_work):
                has_ticked = False
                continue
            seconds = None if self.here.stays else IDLE_TIMEOUT_S
            has_ticked = not (self._watch.wait(self._poll) if watches else self._poll(seconds))
            is_idle = has_ticked and not watches
            if has_ticked and watches:
                self._wake_all()
                poller.take_over(WATCH_INTERVAL_S)
        poller.release()
        return None

    def _has_work(self) -> bool:
        """Returns whether there is something to do for a thread that waits."""
        return bool(self._running or self._tasks or self._urgent or self.poller.handed_over)

    def _has_undone(self) -> bool:
        """Returns whether something is queued that the other threads may have left undone."""
        return bool(self._to_wake or self._tasks or self._urgent)

    def _must_watch(self) -> bool:
        """Returns whether a thread has to look after the others. Called with the lock."""
        return bool(self.poller.kept or self._to_wake) or time.monotonic() < self._watch.until

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
        if not self._closed and (self.here.stays or not is_surplus or is_needed or _has_children_of_thread()):
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
        """Waits for a socket or a wake-up, and reads the socket; returns whether there was one in time."""
        poller = self.poller
        if poller.here.descriptor >= 0:
            poller.release()
        descriptor = poller.wait(seconds)
        if descriptor is None:
            return False
        if descriptor >= 0:
            if poller.is_busy:
                self._watch.extend()
            # Not for a single answer: the thread that waits for it is to have the interpreter for itself.
            if self._watchers and (self._tasks or len(self._urgent) > 1):
                poller.keep(descriptor)
            else:
                poller.watch_again(descriptor)
        return True


def _has_children_of_thread() -> bool:
    """Returns whether the calling thread has a child that it, or another thread, has not waited for.

    Linux counts a child to the thread that has started it, whatever has done that: `os.fork`, `subprocess`,
    multiprocessing or a library in C. If that thread ends, the child gets the signal that it has chosen by
    PR_SET_PDEATHSIG. True if the system cannot tell.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | WNOTHREAD | WALL)
    except ChildProcessError:
        return False
    except OSError:
        return True
    return True


@final
class SerialCalls:
    """Runs blocking calls on threads of the executor, one at a time. Used on the event loop only."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._running = asyncio.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Calls a function on a thread when the calls before it have ended; returns its result.

        If the caller is cancelled, a call that has not begun is dropped. One that runs goes on, and those after it
        wait for its end: else each caller that does not wait for long would leave one more blocked thread behind.
        """
        await self._running.acquire()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        ended = asyncio.wrap_future(result)
        ended.add_done_callback(self._on_end)
        try:
            self._executor.submit_urgent(_call, function, result)
            return await asyncio.shield(ended)
        finally:
            result.cancel()  # does nothing if the call has begun

    def _on_end(self, ended: "asyncio.Future[Any]") -> None:
        self._running.release()
        if not ended.cancelled():
            ended.exception()  # asyncio would log an error that no caller waits for


def _call(function: Callable[[], T], result: "concurrent.futures.Future[T]") -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(function())
    except Exception as error:
        result.set_exception(error)
