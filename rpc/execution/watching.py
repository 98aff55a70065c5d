"""How often a waiting thread of the executor looks after those that run functions."""

import time
from collections.abc import Callable
from typing import final

from .poller import Poller

__all__ = ["MAX_WATCHERS", "WATCH_INTERVAL_S", "Watch"]

WATCH_INTERVAL_S = 0.001
"""Seconds that a thread may keep a socket, and what it has read, while it runs a function; until the next look."""

MAX_WATCH_INTERVAL_S = 0.008
"""Seconds between two looks after some that have found nothing to take over: to look, a thread needs the
interpreter, and the others have to wait for it."""

WATCH_FOR_S = 0.02
"""Seconds after the last busy socket in which a waiting thread looks after the others."""

MAX_WATCHERS = 2
"""Waiting threads that look after the others, at most: the one that looks next may also be the one that reads."""


@final
class Watch:
    """Tells waiting threads when to look after the others. Safe to use from any thread."""

    def __init__(self, poller: Poller, has_undone: Callable[[], bool]) -> None:
        """Nothing has been busy yet. `has_undone` tells whether a thread may have left undone what is queued."""
        self._poller = poller
        self._has_undone = has_undone
        self.until = 0.0
        """When it is long enough ago that a socket was busy, by the monotonic clock."""
        self._interval = WATCH_INTERVAL_S
        """Seconds until the next look. Not reset by each message: most functions take less time."""

    def extend(self) -> None:
        """Notes that the socket that was ready last is busy."""
        self.until = self._poller.last_ready + WATCH_FOR_S

    def wait(self, poll: Callable[[float], bool]) -> bool:
        """Has the calling thread wait, and look after the others now and then; returns whether something happened.

        If not, there is something to do for a thread that watches, or nothing to watch any more. What `poll` does
        is wait for some seconds; it returns whether something happened in them.
        """
        while not poll(self._interval):
            if self._has_undone() or self._poller.is_kept_for(WATCH_INTERVAL_S):
                self._interval = WATCH_INTERVAL_S
                return False
            if not self._poller.kept and time.monotonic() >= self.until:
                return False
            self._interval = min(2 * self._interval, MAX_WATCH_INTERVAL_S)
        return True
