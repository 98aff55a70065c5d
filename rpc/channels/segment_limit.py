"""Numbers the segments of shared memory that one agent makes, and bounds how many there are."""

import itertools
import threading
from collections.abc import Sequence
from typing import final

__all__ = ["SegmentLimit"]


@final
class SegmentLimit:
    """Numbers and bounds the segments of one kind. Safe to use from any thread."""

    def __init__(self, max_bytes: int, max_segments: int, first_number: int = 1) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(first_number)
        self._max_bytes = max_bytes
        self._max_segments = max_segments
        self._count = 0
        self.used = 0
        """Bytes of all segments that have been made and not been released."""

    def acquire(self, nbytes: int) -> int | None:
        """Counts a segment of this size; returns its number, or None if that would be too much."""
        with self._lock:
            if self.used + nbytes > self._max_bytes or self._count >= self._max_segments:
                return None
            self.used += nbytes
            self._count += 1
            return next(self._numbers)

    def release(self, sizes: Sequence[int]) -> None:
        """Counts segments back that are released, or could not be made."""
        with self._lock:
            self.used -= sum(sizes)
            self._count -= len(sizes)
