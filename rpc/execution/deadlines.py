"""Timeouts of calls, kept by one thread."""

import heapq
import threading
import time
from collections.abc import Callable
from typing import final

__all__ = ["Deadlines"]

LONGEST_WAIT = 3600.0
"""Seconds; the system refuses to wait for centuries."""


@final
class Deadlines:
    """Calls `expire(id)` on its thread for every id whose time is up. `expire` must not block.

    Ids need not be taken out when their call completes: `is_live` is asked. Nobody is woken for dead entries, and
    they are swept out when they outnumber the live ones, so memory stays proportional to what is pending.
    """

    def __init__(
        self,
        expire: Callable[[int], None],
        is_live: Callable[[int], bool],
        count_live: Callable[[], int],
        name: str,
    ) -> None:
        self._expire = expire
        self._is_live = is_live
        self._count_live = count_live
        self._heap: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, identifier: int, seconds: float) -> None:
        """Has `identifier` expire in `seconds` from now."""
        entry = (time.monotonic() + seconds, identifier)
        with self._changed:
            heapq.heappush(self._heap, entry)
            if self._heap[0] == entry:
                self._changed.notify()
            if len(self._heap) > 2 * self._count_live() + 1024:
                self._heap = [e for e in self._heap if self._is_live(e[1])]
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
                while not self._closed and (not self._next_is_live() or self._heap[0][0] > time.monotonic()):
                    left = self._heap[0][0] - time.monotonic() if self._heap else LONGEST_WAIT
                    self._changed.wait(min(max(0.0, left), LONGEST_WAIT))
                if self._closed:
                    return
                _, identifier = heapq.heappop(self._heap)
            if self._is_live(identifier):
                self._expire(identifier)

    def _next_is_live(self) -> bool:
        """Drops what is dead ahead of the first live entry. Is there one? Called with the lock."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return bool(self._heap)
