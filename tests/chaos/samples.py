"""What some workers have while others fail, again and again: memory, threads and descriptors must stay flat."""

import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import psutil

from tests.chaos.cluster import Member

__all__ = ["Samples"]

INTERVAL_S = 5.0

MAX_GROWTH = {"MiB": 32, "threads": 8, "fds": 32}
"""By how much the last third of a run may exceed the second. In the first one, pools are filled."""

MIN_COUNT = 6
"""Samples below which growth is not judged."""

Sample = dict[str, int]


class Samples:
    """What each of some workers has had in the course of a run. None of them may be started again.

    Args:
        members: the workers.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._taken: dict[str, list[Sample]] = {each.name: [] for each in members}
        self._due = 0.0

    def take(self) -> None:
        """Takes a sample of each worker, if it is time to."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + INTERVAL_S
        for each in self._members:
            if each.pid is not None:
                with suppress(psutil.Error):
                    process = psutil.Process(each.pid)
                    memory = process.memory_info().rss >> 20
                    sample = {"MiB": memory, "threads": process.num_threads(), "fds": process.num_fds()}
                    self._taken[each.name].append(sample)

    def growth(self) -> list[str]:
        """Returns of what workers have had more and more, in words."""
        found = []
        for name, thirds in self.thirds().items():
            for kind, (_, middle, last) in thirds.items():
                if last > middle + MAX_GROWTH[kind]:
                    found.append(f"{name}: {kind} grew from {middle:g} to {last:g}")
        return found

    def thirds(self) -> dict[str, dict[str, tuple[float, float, float]]]:
        """Returns the median of each third of the run, by worker and kind."""
        return {
            name: {kind: _medians([sample[kind] for sample in taken]) for kind in MAX_GROWTH}
            for name, taken in self._taken.items()
            if len(taken) >= MIN_COUNT
        }


def _medians(values: Sequence[int]) -> tuple[float, float, float]:
    third = len(values) // 3
    return median(values[:third]), median(values[third:-third]), median(values[-third:])
