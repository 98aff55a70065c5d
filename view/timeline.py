"""What workers have done in each second of the last minute: of one worker, and of all together."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

__all__ = ["COUNTERS", "SECONDS", "Timeline", "merged_timeline"]

SECONDS = 60
"""Seconds that are kept."""

COUNTERS = ("calls_sent", "calls_failed", "calls_served", "bytes_sent", "bytes_received")
"""What is counted of a worker."""

CLOSE_TIMEOUT_S = 5.0

SAME_EVENT_S = 10.0
"""Seconds within which several workers notice the same loss, or the same return, of another one."""

Json = Mapping[str, Any]


@final
class Timeline:
    """The last seconds of one worker. A thread reads its counters at the beginning of each second.

    If the thread is late, because the process was stopped or had no time, what it reads belongs to a longer time.
    """

    def __init__(self, read: Callable[[], Sequence[int]], name: str) -> None:
        """Starts the thread, of this name. `read` returns the counters, in their order, on any thread."""
        self._read = read
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float, list[int]]] = deque(maxlen=SECONDS)
        """When a sample ended, as time.time(), the seconds that it covers, and by how much the counters grew."""
        self._last = (time.monotonic(), read())
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ending.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def as_json(self) -> dict[str, list[float]]:
        """Returns lists of equal length: `ended`, `seconds`, and one for each counter; the last is up to now."""
        with self._lock:
            _, current = self._since_last()
            samples = [*self._samples, current]
        return {
            "ended": [round(ended, 3) for ended, _, _ in samples],
            "seconds": [round(seconds, 3) for _, seconds, _ in samples],
            **{name: [growth[i] for _, _, growth in samples] for i, name in enumerate(COUNTERS)},
        }

    def _run(self) -> None:
        while not self._ending.wait(_pause()):
            with self._lock:
                self._last, sample = self._since_last()
                self._samples.append(sample)

    def _since_last(self) -> tuple[tuple[float, Sequence[int]], tuple[float, float, list[int]]]:
        """Returns the counters now, and by how much they have grown since the last sample."""
        then, before = self._last
        now, counters = time.monotonic(), self._read()
        growth = [new - old for new, old in zip(counters, before, strict=True)]
        return (now, counters), (time.time(), now - then, growth)


def _pause() -> float:
    """Returns the seconds until the next second begins."""
    return 1.0 - time.time() % 1.0


def merged_timeline(workers: Sequence[Json], now: float) -> dict[str, Any]:
    """Returns what all workers together have done in each second of the last minute, as JSON values.

    The clocks of hosts may differ: what a worker tells is placed by its age at `now`, when all were asked. The
    states have been checked (snapshot.py).

    Returns:
        `began`, the beginning of the first second, and lists with a number for each second: `calls` (that have
        ended, as their callers count them), `failed`, `bytes` (that were sent), and the workers `lost` and
        `returned`. The last second has not ended.
    """
    began = math.floor(now) - SECONDS + 1
    rows = {name: [0.0] * SECONDS for name in ("calls", "failed", "bytes", "lost", "returned")}
    events: list[tuple[float, str, str]] = []
    for state in (each["state"] for each in workers if each["state"] is not None):
        skew = now - state["time"]
        for second, counts in _per_second(state["timeline"], began - skew):
            for name, row in (("calls_sent", "calls"), ("calls_failed", "failed"), ("bytes_sent", "bytes")):
                rows[row][second] += counts[name]
        events += [(each["time"] + skew - began, each["event"], each["worker"]) for each in state["events"]]
    for when, event in _distinct(events):
        if 0 <= when < SECONDS and event in _EVENT_ROWS:
            rows[_EVENT_ROWS[event]][int(when)] += 1
    rounded = {name: [round(count, 1) for count in row] for name, row in rows.items()}
    return {"began": began, **rounded}


_EVENT_ROWS = {"lost": "lost", "back": "returned", "returned": "returned"}


def _per_second(timeline: Json, began: float) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields seconds since `began` with what was counted in them: a sample is spread over those that it covers."""
    columns = [timeline[name][-SECONDS - 1 :] for name in ("ended", "seconds", *COUNTERS)]
    for ended, seconds, *growth in zip(*columns, strict=True):
        length = max(seconds, 1e-3)
        first, last = ended - length - began, ended - began
        for second in range(max(0, math.floor(first)), min(SECONDS, math.floor(last) + 1)):
            part = (min(last, second + 1) - max(first, second)) / length
            yield second, {name: count * part for name, count in zip(COUNTERS, growth, strict=True)}


def _distinct(events: Sequence[tuple[float, str, str]]) -> Iterator[tuple[float, str]]:
    """Yields when something happened to a worker, and what, once for all workers that have noticed it."""
    last: dict[tuple[str, str], float] = {}
    for second, event, worker in sorted(events):
        if second - last.get((event, worker), -math.inf) > SAME_EVENT_S:
            yield second, event
        last[event, worker] = second
