"""A thread that advances or watches the operations that no other thread waits for."""

import threading
import weakref
from collections.abc import Callable
from typing import Final, final

__all__ = ["PollingThread"]

MAX_IDLE_POLLS: Final = 20
"""Consecutive polls without anything to do, after which the thread stops polling until it is woken."""

IDLE_TIMEOUT_S: Final = 10.0
"""Seconds without being woken after which the thread ends; the next `start` starts another one."""


@final
class PollingThread:
    """Calls a method as long as it has something to do, and for a while after that.

    Waking a thread for each of many operations would cost more than to poll while they follow each other.

    Args:
        name: of the thread.
        poll: a method that returns the seconds after which to call it again; None if it has nothing to do. Its
            object is not kept alive.
        interval_s: seconds between polls that find nothing to do.
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
