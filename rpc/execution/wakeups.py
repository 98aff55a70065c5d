"""Threads that are to be woken, a moment later than now."""

import contextlib
from collections import deque
from typing import final

from .waiter import Wakeable

__all__ = ["DeferredWakeups"]


@final
class DeferredWakeups:
    """What waiting threads wait by. Safe to use from any thread.

    A thread that is woken needs the interpreter, which the thread that wakes it still has. So that one
    wakes it when it has nothing more to do.
    """

    def __init__(self) -> None:
        self._waiters: deque[Wakeable] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, waiter: Wakeable) -> None:
        """Has a thread woken by the next `wake_all`."""
        self._waiters.append(waiter)

    def wake_all(self) -> None:
        """Wakes the threads."""
        while self._waiters:
            with contextlib.suppress(IndexError):  # another thread has taken it
                self._waiters.popleft().release()
