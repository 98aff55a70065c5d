"""Timeouts of requests, kept by one thread."""

import heapq
import threading
import time
from collections.abc import Callable
from typing import final

__all__ = ["Deadlines"]

MAX_WAIT_S = 3600.0
"""Seconds of one wait; the operating system refuses waits of centuries."""

MAX_SETTLED_ENTRIES = 1024
"""Entries of settled requests that are kept besides as many as there are live ones."""


@final
class Deadlines:
    """Calls a function on its own thread for each id whose time is up.

    An id need not be removed when its request completes: `is_live` tells. No thread wakes up for settled
    requests, and their entries are removed when they outnumber the live ones, so memory stays proportional to
    what is pending.
    """

    def __init__(
        self,
        expire: Callable[[int], None],
        is_live: Callable[[int], bool],
        count_live: Callable[[], int],
        name: str,
    ) -> None:
        """Starts the thread.

        Args:
            expire: called with an id when its time is up. Must not block.
            is_live: returns whether the request with this id is pending. Called with a lock held.
            count_live: returns how many requests are pending. Called with a lock held.
            name: of the thread.
        """
        self._expire = expire
        self._is_live = is_live
        self._count_live = count_live
        self._heap: list[tuple[float, int]] = []
        """Time of `time.monotonic` and id."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, identifier: int, seconds: float) -> None:
        """Has an id expire in `seconds` from now."""
        deadline = (time.monotonic() + seconds, identifier)
        with self._changed:
            heapq.heappush(self._heap, deadline)
            if self._heap[0] == deadline:
                self._changed.notify()
            if len(self._heap) > 2 * self._count_live() + MAX_SETTLED_ENTRIES:
                self._heap = [each for each in self._heap if self._is_live(each[1])]
                heapq.heapify(self._heap)

    def close(self) -> None:
        """Ends the thread; nothing expires afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._seconds_left()) > 0:
                    self._changed.wait(min(left, MAX_WAIT_S))
                if self._closed:
                    return
                _, identifier = heapq.heappop(self._heap)
            if self._is_live(identifier):
                self._expire(identifier)

    def _seconds_left(self) -> float:
        """Returns the time until the first live id expires, and removes those before it. Called with the lock."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] - time.monotonic() if self._heap else MAX_WAIT_S
