"""Counts durations on a logarithmic scale."""

import threading
from array import array
from typing import final

import numpy as np

__all__ = ["BOUNDS_S", "MAX_BUCKETS", "Histogram"]

MAX_BUCKETS = 160
"""Buckets of a histogram; the last one begins at 18 minutes."""

_BOUND_BITS = range(14, 36, 2)

BOUNDS_S = tuple(2**bits / 1e9 for bits in _BOUND_BITS)
"""The upper bounds, in seconds, of the buckets that are shown: 16 µs, 66 µs and so on, to 17 s."""

MAX_PENDING = 256
"""Durations that are kept before they are counted, all at once: that takes a tenth of the time."""

COUNT_TIMEOUT_S = 1.0
"""Seconds that a reader waits while another thread counts; a signal handler may be inside of that thread."""


@final
class Histogram:
    """Durations, of which each is counted in a bucket a quarter as wide as its octave.

    So a quantile is off by an eighth at most. Safe to use from several threads, and from signal handlers.
    """

    __slots__ = ("_count", "_counts", "_lock", "_pending", "_total_ns")

    def __init__(self) -> None:
        self._counts = np.zeros(MAX_BUCKETS, np.int64)
        self._count = 0
        self._total_ns = 0
        self._pending = array("q")
        """Durations that are not counted yet. Appending to it is one operation of the interpreter."""
        self._lock = threading.Lock()
        """Held while durations are counted."""

    def add(self, nanoseconds: int) -> None:
        """Counts a duration."""
        pending = self._pending
        pending.append(nanoseconds)
        if len(pending) >= MAX_PENDING:
            self._count_pending(0.0)

    def _count_pending(self, timeout: float = COUNT_TIMEOUT_S) -> None:
        """Counts the durations that wait for it; does nothing if another thread does so for longer."""
        if not self._pending or not self._lock.acquire(timeout=timeout):
            return
        try:
            pending = self._pending
            length = len(pending)
            durations = np.frombuffer(pending[:length], np.int64)
            del pending[:length]  # not what has been appended meanwhile
            shifts = np.maximum(np.frexp(durations.astype(np.float64))[1] - 3, 0)
            indices = np.minimum((shifts << 2) + (durations >> shifts), MAX_BUCKETS - 1)
            self._counts += np.bincount(indices, minlength=MAX_BUCKETS)
            self._count += length
            self._total_ns += int(durations.sum())
        finally:
            self._lock.release()

    def counted(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Returns how many durations there were, by bucket."""
        self._count_pending()
        return self._counts

    @property
    def total_ns(self) -> int:
        """The sum of all durations, in nanoseconds."""
        self._count_pending()
        return self._total_ns

    @property
    def count(self) -> int:
        """How many durations there were."""
        self._count_pending()
        return self._count

    def quantile(self, fraction: float) -> float | None:
        """Returns the duration in seconds that this fraction of all does not exceed; None if there is none."""
        totals = np.cumsum(self.counted())
        if not totals[-1]:
            return None
        rank = max(fraction * totals[-1], 1)
        return _middle_ns(int(np.searchsorted(totals, rank))) / 1e9

    def as_json(self) -> dict[str, float | list[int] | None]:
        """Returns the quantiles that are shown and the sum, in seconds, and how many were within each bound."""
        totals = np.cumsum(self.counted())
        return {
            "total_s": self.total_ns / 1e9,
            "p50_s": self.quantile(0.5),
            "p99_s": self.quantile(0.99),
            "within": [int(totals[4 * (bits - 1) - 1]) for bits in _BOUND_BITS],
        }


def _middle_ns(index: int) -> float:
    if index < 8:
        return index
    shift, quarter = (index >> 2) - 1, 4 + (index & 3)
    return (quarter + 0.5) * (1 << shift)
