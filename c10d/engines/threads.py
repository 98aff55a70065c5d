"""The threads on which operations of engines run, besides those of their callers.

A SerialQueue runs operations of blocking engines one after another, without changing threads where possible. A
queued task runs on whichever thread gets to it first: one that waits for it, or the queue's own thread. A thread
that waits at once, as synchronous calls do, runs the task itself: waking another thread costs more than a small
collective takes.

A PollingThread advances or watches the operations that no other thread waits for.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, final

from .base import PendingOperation, peek

__all__ = ["PollingThread", "SerialQueue", "SerialTask"]

IDLE_TIMEOUT_S = 10.0
"""Seconds without anything to do after which a thread ends; what needs a thread then starts another."""

MAX_IDLE_POLLS: Final = 20
"""Consecutive polls without anything to do, after which the thread stops polling until it is woken."""


@final
class SerialTask:
    """A task of a SerialQueue, a PendingOperation that is done when what its function has started is done as well.

    has_run: whether the function has returned, or raised an error.
    """

    def __init__(self, queue: "SerialQueue", function: Callable[[], PendingOperation | int | None]) -> None:
        self._queue = queue
        self._function: Callable[[], PendingOperation | int | None] | None = function
        self.has_run = False
        self._callbacks: list[Callable[[], None]] = []
        self._source: int | None = None
        self._started: PendingOperation | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: float | None) -> None:
        """Waits until the task is done, at most `timeout` seconds. Raises what the task raised, or TimeoutError.

        Without a timeout the calling thread runs the task itself, and the tasks before it, unless another thread
        is running the queue. With a timeout it must not: the task may take longer.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.has_run and not (timeout is None and self._queue.run_until(self)):
            has_run = threading.Event()
            self._on_run(has_run.set)
            if timeout is not None:
                self._queue.wake_thread()
            if not has_run.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        if self._started is not None:
            self._started.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def done(self) -> bool:
        """Returns whether the task has finished, successfully or not."""
        return self.has_run and (self._started is None or self._started.done())

    def peek(self) -> bool:
        """Returns whether the task is known to have finished; see `peek`."""
        return self.has_run and (self._started is None or peek(self._started))

    def source(self) -> int:
        """Returns the rank that sent the message of a completed receive."""
        if self._started is not None:
            return self._started.source()
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the task has finished; at once if it has already."""
        self._on_run(lambda: callback() if self._started is None else self._started.on_done(callback))

    def _on_run(self, callback: Callable[[], None]) -> None:
        with self._queue.callbacks_lock:
            if not self.has_run:
                self._callbacks.append(callback)
                return
        callback()

    def run(self) -> None:
        """Runs the task. Only its queue calls this, once."""
        function, self._function = self._function, None  # it refers to the tensors
        assert function is not None
        try:
            result = function()
            if result is None or isinstance(result, int):
                self._source = result
            else:
                self._started = result
        except BaseException as error:
            self._error = error.with_traceback(None)  # the frames refer to the tensors
        with self._queue.callbacks_lock:
            self.has_run = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@final
class SerialQueue:
    """Runs tasks in the order in which they were submitted, one at a time.

    Owned by a process group or an engine, which closes it. Its thread runs only while there are tasks that no
    other thread waits for.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._tasks: deque[SerialTask] = deque()
        self._running = threading.Lock()
        """Held by the thread that runs tasks."""
        self._submitted = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.callbacks_lock: Final = threading.Lock()
        """Held while a task of this queue accepts a callback or becomes done."""

    def submit(self, function: Callable[[], PendingOperation | int | None], *, needs_thread: bool) -> SerialTask:
        """Adds a task, whose function returns what an operation of an engine returns (engines/base.py).

        With `needs_thread`, the queue's thread runs it; without, the caller is about to wait for it.
        """
        task = SerialTask(self, function)
        self._tasks.append(task)
        if needs_thread:
            self.wake_thread()
        return task

    def try_acquire(self) -> bool:
        """Acquires the empty queue for the calling thread, which may then do its work without a task.

        Returns False at once if there are tasks on the queue or another thread has it.
        """
        if not self._running.acquire(blocking=False):
            return False
        if self._tasks:
            self._running.release()
            return False
        return True

    def release(self) -> None:
        """Releases the queue after `try_acquire`. If tasks have been submitted meanwhile, its thread runs them."""
        self._running.release()
        if self._tasks:
            self.wake_thread()

    def run_until(self, last: SerialTask) -> bool:
        """Runs the tasks up to and including `last`. Returns False if another thread is running the queue."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            while not last.has_run:
                self._tasks.popleft().run()
        finally:
            self.release()
        return True

    def close(self) -> None:
        """Ends the thread after it has run the tasks that are there, and waits for it."""
        with self._submitted:
            self._is_closed = True
            self._submitted.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wake_thread(self) -> None:
        """Has the queue's thread run the tasks that are there, and starts it if need be."""
        with self._submitted:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._submitted.notify()

    def _loop(self) -> None:
        while True:
            with self._running:
                while self._tasks:
                    self._tasks.popleft().run()
            with self._submitted:
                if self._tasks:
                    continue
                if self._is_closed or (not self._submitted.wait(IDLE_TIMEOUT_S) and not self._tasks):
                    self._thread = None
                    return


@final
class PollingThread:
    """Calls a method as long as it has something to do, and for a while after that.

    Waking a thread for each of many operations would cost more than to poll while they follow each other.

    `poll` returns the seconds after which to call it again; None if it has nothing to do. Its object is not kept
    alive. `interval_s` is between polls that find nothing to do.
    """

    def __init__(self, name: str, poll: Callable[[], float | None], interval_s: float) -> None:
        self._name = name
        self._poll_method = weakref.WeakMethod(poll)
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_polling = False
        self._is_closed = False

    def start(self) -> None:
        """Has the thread poll, unless it does so already. Called when there is something new to do."""
        if not self._is_polling:
            self.wake()

    def wake(self) -> None:
        """Has the thread poll at once."""
        with self._lock:
            self._wake.set()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread, and waits for it unless called on it."""
        with self._lock:
            self._is_closed = True
            self._wake.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        idle_polls = 0
        while True:
            self._wake.clear()
            if self._is_closed:  # looked at after the clear, which may have taken the wake-up of `close`
                return
            poll = self._poll_method()
            pause_s = None if poll is None else poll()
            del poll  # must not keep its object alive while this thread sleeps
            idle_polls = idle_polls + 1 if pause_s is None else 0
            if idle_polls <= MAX_IDLE_POLLS:
                self._is_polling = True
                self._wake.wait(self._interval_s if pause_s is None else pause_s)
            elif self._is_polling:
                self._is_polling = False  # polls once more: what began before did not wake this thread
            elif self._wake.wait(IDLE_TIMEOUT_S):
                idle_polls = 0
            else:
                with self._lock:
                    if not self._wake.is_set():
                        self._thread = None
                        return
