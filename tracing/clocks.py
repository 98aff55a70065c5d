"""How far the clocks of two workers are apart, as NTP measures it: by the fastest of some exchanges."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

__all__ = ["Clock", "ClockReading", "read_clock"]

EXCHANGES = 8


@final
@dataclass(frozen=True, slots=True)
class ClockReading:
    """How far another clock was ahead of the one here. All are nanoseconds.

    at_ns: when that was, by the clock here.
    offset_ns: negative if it was behind.
    error_ns: how far the offset may be wrong: half of the round trip.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def read_clock(ask: Callable[[], int], clock: Callable[[], int] = time.time_ns) -> ClockReading:
    """Measures how far another clock, which `ask` reads, is ahead of the one here; both count nanoseconds."""
    readings = []
    for _ in range(EXCHANGES):
        asked = clock()
        there = ask()
        answered = clock()
        middle = (asked + answered) // 2
        readings.append(ClockReading(middle, there - middle, (answered - asked + 1) // 2))
    return min(readings, key=lambda each: each.error_ns)


@final
@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of another worker, read at the beginning and at the end of a profile.

    Between them the offset changes evenly, as that of clocks of different speed does.
    """

    first: ClockReading
    last: ClockReading

    @property
    def error_ns(self) -> int:
        """How far times by the clock here may be wrong, in nanoseconds."""
        return max(self.first.error_ns, self.last.error_ns)

    def to_local(self, there_ns: int) -> int:
        """Returns the time by the clock here for one by that of the other worker; nanoseconds since 1970."""
        first, last = self.first, self.last
        elapsed = last.at_ns - first.at_ns
        if elapsed <= 0:
            return there_ns - first.offset_ns
        part = (there_ns - first.offset_ns - first.at_ns) / elapsed
        return there_ns - first.offset_ns - round((last.offset_ns - first.offset_ns) * min(max(part, 0.0), 1.0))
