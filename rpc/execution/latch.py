"""Waits that any thread may end, and that notice signals."""

import threading
import time
from contextlib import suppress
from typing import final

from .ctrl_c import ctrl_c, interruptible

__all__ = ["MAX_SLICE_S", "Latch", "acquire"]

FIRST_SLICE_S = 0.02
MAX_SLICE_S = 1.0
"""Seconds of the first slice of a wait, and of the longest; each is twice as long as that before."""


@interruptible
def acquire(lock: threading.Lock, seconds: float | None = None) -> bool:
    """Acquires a lock as `lock.acquire` does, but runs the handlers of all signals; returns whether it has.

    A signal that arrives while the main thread is about to block, and hands over the interpreter, does not wake
    it: Python would run its handler when the wait is over. So the wait is cut into slices.
    """
    ctrl_c.check()
    if seconds is None and lock.acquire(timeout=FIRST_SLICE_S):
        return True
    deadline = None if seconds is None else time.monotonic() + seconds
    length = FIRST_SLICE_S
    while True:
        left = length if deadline is None else min(length, deadline - time.monotonic())
        if lock.acquire(timeout=max(0.0, left)):
            return True
        if left < length:
            return False
        length = min(2 * length, MAX_SLICE_S)


@final
class Latch:
    """An event that is set once and stays set.

    Unlike `threading.Event` it has no lock that is held for longer than one step. So a handler of a signal may set
    it, and wait for it, whatever it has interrupted on its thread: another wait, for instance.
    """

    def __init__(self) -> None:
        self.is_set = False
        """Whether it has been set."""
        self._waiters: list[threading.Lock] = []
        """The held lock of each thread that waits, which is released when the latch is set."""

    def set(self) -> None:
        """Sets it, and wakes the threads that wait."""
        self.is_set = True
        with suppress(IndexError):
            while True:
                self._waiters.pop().release()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is set, for so many seconds at most; returns whether it is set."""
        woken = threading.Lock()
        woken.acquire()
        self._waiters.append(woken)
        if not self.is_set:  # else whoever has set it may have looked at the waiters before
            acquire(woken, seconds)
        with suppress(ValueError):  # `set` has taken it
            self._waiters.remove(woken)
        return self.is_set
