"""What the kernel tells about the processors: whether threads have to wait for one."""

import contextlib
import os
import weakref
from typing import final

__all__ = ["Crowding"]

EVERY = 4
"""Calls of `is_crowded` for each of which one asks the kernel, which takes 2 µs."""

CROWDED = 0.5
"""Share of the answers that say so, above which the machine counts as crowded. Two workers on two processors, with
the threads that each of them wakes now and then, make it 0.1 to 0.4, and four workers 0.9."""

WEIGHT = 1 / 16
"""That of one answer in this share."""


@final
class Crowding:
    """Whether more threads of the machine are ready to run, most of the time, than it has processors.

    Then a thread that looks at something again and again keeps others from running. Safe to use from any thread.
    """

    def __init__(self, path: str = "/proc/loadavg", processors: int | None = None) -> None:
        """Asks nothing yet.

        Args:
            path: of the file that the kernel answers by. Without it, the machine never counts as crowded.
            processors: those of the machine; by default as many as the kernel says.
        """
        self._processors = processors or os.cpu_count() or 1
        self._descriptor = -1
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._calls = 0
        self._share = 0.0
        """Of the last answers, those that there were too many."""

    def is_crowded(self) -> bool:
        """Returns whether it has been so lately."""
        self._calls += 1
        if self._calls % EVERY == 0 and self._descriptor >= 0:
            self._share += WEIGHT * (self._are_too_many() - self._share)
        return self._share > CROWDED

    def _are_too_many(self) -> bool:
        """Returns whether more threads are ready now, this one included, than there are processors."""
        try:
            fields = os.pread(self._descriptor, 64, 0).split()
        except OSError as error:
            if error.errno is None:  # raised by the handler of a signal
                raise
            return False
        # Three averages, then the threads that are ready and all that there are: 0.20 0.18 0.12 1/80 11206.
        ready = fields[3].partition(b"/")[0] if len(fields) > 3 else b""
        return ready.isdigit() and int(ready) > self._processors
