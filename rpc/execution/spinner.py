"""Busy polling: a thread looks at descriptors again and again before it sleeps, since to be woken takes longer."""

import os
import time
from collections.abc import Callable
from typing import final

__all__ = ["Events", "Spinner"]

MAX_LOOK_S = 3e-4
"""Seconds that one look may take. If it takes longer, others need the interpreter or the processor."""

MAX_SKIPPED = 64
"""Waits in a row, at most, in which the thread does not look again and again."""

Events = list[tuple[int, int]]
"""Descriptors that are ready, with the events of each."""


@final
class Spinner:
    """Busy-polls descriptors, or looks once if more has been in vain lately. Used by one thread.

    Between two looks it yields the processor, perhaps to the worker that is to answer: the kernel often has both
    run on the same one, although another is idle.
    """

    def __init__(self, seconds: float) -> None:
        """Args: seconds: how long it looks at most; 0 for once."""
        self._seconds = seconds
        self._to_skip = 0
        """Waits from now on in which it looks once."""
        self._skips = 0
        """How many such waits followed the last one that was in vain."""

    def spin(self, poll: Callable[[int], Events], stop: Callable[[], object] = bool) -> Events:
        """Looks at the descriptors.

        Args:
            poll: returns what is ready; its argument is 0.
            stop: returns whether to look no longer.

        Returns:
            What is ready; nothing if nothing became ready in time, or if something else has to run.
        """
        if self._to_skip or not self._seconds:
            if self._to_skip:
                self._to_skip -= 1
            return poll(0)  # one look costs less than to go to sleep, and what follows a message may be there
        before = time.monotonic()
        end = before + self._seconds
        while not (events := poll(0)):
            now = time.monotonic()
            if now > end:
                self._skips = self._to_skip = min(2 * self._skips + 1, MAX_SKIPPED)
                return events
            if now > before + MAX_LOOK_S or stop():
                return events
            before = now
            os.sched_yield()
        self._skips = 0
        return events
