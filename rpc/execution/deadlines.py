"""Timeouts of requests, kept by one thread."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, Generic, TypeVar, final

__all__ = ["Deadlines", "DeadlinesFactory"]

log = logging.getLogger(__name__)

MAX_WAIT_S = 3600.0
"""Seconds of one wait; the operating system refuses waits of centuries."""

MAX_SETTLED_ENTRIES = 1024
"""Entries of settled requests that are kept besides as many as there are live ones."""

K = TypeVar("K", bound=Hashable)
"""The type of the ids."""

_Queue = deque[tuple[float, K]]
"""Deadlines, as times of `time.monotonic`, and ids. All have the same timeout, so they are in order."""


@final
class Deadlines(Generic[K]):
    """Calls a function on its own thread for each id whose time is up.

    An id need not be removed when its request completes: `is_live` tells. No thread wakes up for settled
    requests, and their entries are removed when they outnumber the live ones, so memory stays proportional to
    what is pending.
    """

    def __init__(
        self,
        expire: Callable[[K], None],
        is_live: Callable[[K], bool],
        count_live: Callable[[], int],
        name: str,
    ) -> None:
        """Starts the thread.

        Args:
            expire: called with an id when its time is up. Must not block.
            is_live: returns whether the request with this id is pending.
            count_live: returns how many are.
            name: of the thread.
        """
        self._expire = expire
        self._is_live = is_live
        self._count_live = count_live
        self._queues: dict[float, _Queue[K]] = {}
        """By timeout."""
        self._entries = 0
        self._lock = threading.Lock()
        """Guards the queues."""
        self._changed = threading.Condition(self._lock)
        self._wakes_at = math.inf
        """When the thread looks again; later than it does while it is looking."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, identifier: K, seconds: float) -> None:
        """Has an id expire in `seconds` from now."""
        deadline = time.monotonic() + seconds
        with self._lock:
            queue = self._queues.get(seconds)
            if queue is None:
                queue = self._queues[seconds] = deque()
            while queue and not self._is_live(queue[0][1]):
                queue.popleft()
                self._entries -= 1
            queue.append((deadline, identifier))
            self._entries += 1
            if deadline < self._wakes_at:
                self._changed.notify()
            if self._entries + len(self._queues) > 2 * self._count_live() + MAX_SETTLED_ENTRIES:
                self._remove_settled()

    def close(self) -> None:
        """Ends the thread; nothing expires afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _remove_settled(self) -> None:
        """Removes the entries of settled requests. Called with the lock."""
        for seconds, queue in list(self._queues.items()):
            live = deque(entry for entry in queue if self._is_live(entry[1]))
            if live:
                self._queues[seconds] = live
            else:
                del self._queues[seconds]
        self._entries = sum(map(len, self._queues.values()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._seconds_left()) > 0:
                    self._changed.wait(left)
                    self._wakes_at = math.inf
                if self._closed:
                    return
                expired = self._take_expired()
            for identifier in expired:
                if self._is_live(identifier):
                    try:
                        self._expire(identifier)
                    except Exception:
                        log.exception("a request that has timed out cannot be ended")

    def _seconds_left(self) -> float:
        """Returns the time until the first live id expires, and removes those before it. Called with the lock."""
        first = math.inf
        for queue in self._queues.values():
            while queue and not self._is_live(queue[0][1]):
                queue.popleft()
                self._entries -= 1
            if queue:
                first = min(first, queue[0][0])
        now = time.monotonic()
        self._wakes_at = min(first, now + MAX_WAIT_S)
        return self._wakes_at - now

    def _take_expired(self) -> list[K]:
        """Removes and returns the ids whose time is up. Called with the lock."""
        now = time.monotonic()
        expired: list[tuple[float, K]] = []
        for queue in self._queues.values():
            while queue and queue[0][0] <= now:
                expired.append(queue.popleft())
                self._entries -= 1
        return [identifier for _, identifier in sorted(expired, key=itemgetter(0))]


DeadlinesFactory = Callable[[Callable[[Any], None], Callable[[Any], bool], Callable[[], int], str], Deadlines[Any]]
"""Makes a Deadlines, with the arguments of its constructor."""
