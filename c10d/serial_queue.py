"""Lanes: operations of blocking engines, one after another, without a change of threads where none is needed.

What is put on a lane is run by whoever gets to it first: the thread that waits for it, or the lane's own thread.
Who waits at once, as synchronous calls do, runs the operation on its own thread; that saves waking another, which
costs more than a small collective takes.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, final

__all__ = ["SerialQueue", "SerialTask"]

IDLE_SECONDS = 10.0
"""A thread with nothing to do ends after so long; the next operation that needs one starts another."""


@final
class SerialTask:
    """An operation on a lane. It is a Pending (see engines.base)."""

    def __init__(self, lane: "SerialQueue", run: Callable[[], int | None]) -> None:
        self._lane = lane
        self._run: Callable[[], int | None] | None = run
        self._over = False
        self._callbacks: list[Callable[[], None]] = []
        self._source: int | None = None
        self._error: BaseException | None = None

    def wait(self, timeout: float | None) -> None:
        """Waits until it is done; runs it, if nobody does and there is no limit, for that takes what it takes."""
        if not self._over and not (timeout is None and self._lane.run_until(self)):
            over = threading.Event()
            self.on_done(over.set)
            if timeout is not None:
                self._lane.wake()
            if not over.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Is it over, well or badly?"""
        return self._over

    def source(self) -> int:
        """Of a receive that is done: the rank that sent."""
        assert self._source is not None
        return self._source

    def on_done(self, callback: Callable[[], None]) -> None:
        """Has `callback` called once when it is over, at once if it is."""
        with self._lane.changing:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()

    def run(self) -> None:
        """Runs the operation. Only the lane does this, once."""
        run, self._run = self._run, None  # it holds the tensors
        assert run is not None
        try:
            self._source = run()
        except BaseException as error:
            self._error = error.with_traceback(None)  # the frames hold the tensors
        with self._lane.changing:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


@final
class SerialQueue:
    """Runs jobs in the order in which they were put on it, one at a time.

    Owned by a process group. Its thread exists while there is something that nobody waits for.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._jobs: deque[SerialTask] = deque()
        self._running = threading.Lock()
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.changing: Final = threading.Lock()
        """Held while jobs of this lane take callbacks or become done."""

    def put(self, run: Callable[[], int | None], *, now: bool) -> SerialTask:
        """Adds a job; with `now` the caller is about to wait for it, so that no thread need be woken."""
        job = SerialTask(self, run)
        self._jobs.append(job)
        if not now:
            self.wake()
        return job

    def enter(self) -> bool:
        """Takes the lane for the calling thread, if there is nothing on it: what it does now needs no job."""
        if not self._running.acquire(blocking=False):
            return False
        if self._jobs:
            self._running.release()
            return False
        return True

    def leave(self) -> None:
        """Gives the lane back, to its thread if others have put jobs on it."""
        self._running.release()
        if self._jobs:
            self.wake()

    def run_until(self, wanted: SerialTask) -> bool:
        """Runs jobs up to this one; False if another thread is at it."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            while not wanted.done():
                self._jobs.popleft().run()
        finally:
            self.leave()
        return True

    def close(self) -> None:
        """Lets the thread end, once it has run what is there, and waits for it."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wake(self) -> None:
        """Has the lane's thread run what is there."""
        with self._arrived:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._arrived.notify()

    def _loop(self) -> None:
        while True:
            with self._running:
                while self._jobs:
                    self._jobs.popleft().run()
            with self._arrived:
                if self._jobs:
                    continue
                if self._closed or (not self._arrived.wait(IDLE_SECONDS) and not self._jobs):
                    self._thread = None
                    return
