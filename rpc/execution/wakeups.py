"""Threads that are to be woken, a moment later than now."""

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
