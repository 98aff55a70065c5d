"""One Chrome trace of what several workers have recorded, with their clocks aligned.

How far the clocks of two workers are apart is measured as NTP does: by the fastest of some exchanges.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from .recording import Call, Recording, Run

__all__ = ["Clock", "ClockReading", "WorkerTrace", "merge", "read_clock"]

EXCHANGES = 8

PROCESSES_PER_WORKER = 1 << 10
"""In the trace, the first process of a worker is the worker itself, the others its GPUs."""

FIRST_ROW = 1 << 24
"""The thread of the first row of a worker's calls; those of the operating system are below."""

FLOW_SHIFT = 40
"""Ids of arrows are unique on a worker only, so the number of the worker is put above these bits."""


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


Event = dict[str, Any]


class WorkerTrace(NamedTuple):
    """What one worker has recorded, and its clock."""

    name: str
    wire_id: int
    recording: Recording
    clock: Clock

    def time_of(self, event: Event) -> int:
        """Returns the time of an event of torch by the clock of the worker that merges, in nanoseconds."""
        return self.clock.to_local(self.recording.base_ns + round(event["ts"] * 1e3))

    def times(self) -> Iterator[int]:
        """Yields all times but those of metadata events, by the clock of the worker that merges."""
        yield from (self.time_of(each) for each in self.recording.events if each["ph"] != "M")
        yield from (self.clock.to_local(each.begun_ns) for each in self.recording.calls)
        yield from (self.clock.to_local(each.begun_ns) for each in self.recording.runs)


def merge(workers: Sequence[WorkerTrace]) -> Event:
    """Returns the trace of all workers.

    A worker is a process. It has a row for each thread, with torch's events and the functions that it has run for
    others, and as many rows as it had calls in flight at a time. An arrow leads from each call to its function.

    Args:
        workers: in the order in which they are shown.
    """
    base_ns = min((time for worker in workers for time in worker.times()), default=0)
    calls = {(each.wire_id, call.id) for each in workers for call in each.recording.calls}
    events: list[Event] = []
    for number, worker in enumerate(workers):
        events += _of_torch(number, worker, base_ns)
        events += _of_calls(number, worker, base_ns)
        events += _of_runs(number, worker, base_ns, calls)
        events += _of_left_out(number, worker, base_ns)
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "workers": {each.name: _facts(each) for each in workers},
        "traceEvents": events,
    }


def _facts(worker: WorkerTrace) -> dict[str, float]:
    clock = worker.clock
    return {
        "clock_offset_us": clock.last.offset_ns / 1e3,
        "clock_error_us": clock.error_ns / 1e3,
        "left_out": worker.recording.left_out,
    }


def _of_torch(number: int, worker: WorkerTrace, base_ns: int) -> Iterator[Event]:
    """Yields torch's events of one worker, and names for its processes."""
    main = number * PROCESSES_PER_WORKER
    processes = {worker.recording.process: main}
    labels: dict[int, str] = {}
    for event in worker.recording.events:
        process = processes.setdefault(event["pid"], main + min(len(processes), PROCESSES_PER_WORKER - 1))
        if event["ph"] == "M" and event.get("name") in {"process_name", "process_labels", "process_sort_index"}:
            if event["name"] == "process_labels" and isinstance(arguments := event.get("args"), dict):
                labels[process] = str(arguments.get("labels", ""))
            continue
        changed = {**event, "pid": process}
        if event["ph"] == "M":
            changed["ts"] = 0
        else:
            changed["ts"] = (worker.time_of(event) - base_ns) / 1e3
        if event["ph"] in {"s", "t", "f"} and isinstance(event.get("id"), int):
            changed["id"] = (number << FLOW_SHIFT) | (event["id"] & ((1 << FLOW_SHIFT) - 1))
        yield changed
    for process in processes.values():
        name = worker.name if process == main else f"{worker.name} {labels.get(process, '')}".rstrip()
        yield _metadata_event("process_name", process, 0, {"name": name})
        yield _metadata_event("process_sort_index", process, 0, {"sort_index": process})


def _of_calls(number: int, worker: WorkerTrace, base_ns: int) -> Iterator[Event]:
    """Yields the calls of one worker: each in the first row in which it overlaps with no other."""
    process = number * PROCESSES_PER_WORKER
    rows = 0
    for row, call in _rows(worker.recording.calls):
        thread = FIRST_ROW + row
        if row == rows:
            rows += 1
            yield _metadata_event("thread_name", process, thread, {"name": f"calls {rows}"})
            yield _metadata_event("thread_sort_index", process, thread, {"sort_index": thread})
        begun = (worker.clock.to_local(call.begun_ns) - base_ns) / 1e3
        yield _slice(call, "rpc_call", process, thread, begun, {"id": call.id, "callee": call.callee})
        yield _flow_event("s", worker.wire_id, call.id, process, thread, begun)


def _rows(calls: Iterable[Call]) -> Iterator[tuple[int, Call]]:
    """Yields each call with the number of its row."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    """The end and the row of the calls that have begun, the first that ends first."""
    rows = 0
    for call in sorted(calls, key=lambda each: each.begun_ns):
        while busy and busy[0][0] <= call.begun_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        heapq.heappush(busy, (call.ended_ns, row))
        yield row, call


def _of_runs(number: int, worker: WorkerTrace, base_ns: int, calls: set[tuple[int, int]]) -> Iterator[Event]:
    """Yields the functions that one worker has run for others, and the arrows that lead to them."""
    process = number * PROCESSES_PER_WORKER
    for run in worker.recording.runs:
        begun = (worker.clock.to_local(run.begun_ns) - base_ns) / 1e3
        yield _slice(run, "rpc_run", process, run.thread, begun, {"id": run.id, "caller": run.caller})
        if (run.caller, run.id) in calls:
            yield _flow_event("f", run.caller, run.id, process, run.thread, begun)


def _of_left_out(number: int, worker: WorkerTrace, base_ns: int) -> Iterator[Event]:
    """Yields an instant event where the recording of one worker begins to be incomplete, if it does."""
    if left_out := worker.recording.left_out:
        yield {
            "ph": "i",
            "s": "p",
            "cat": "gradwire",
            "name": f"from here on, {left_out} events are left out: the recording would be too large",
            "pid": number * PROCESSES_PER_WORKER,
            "tid": 0,
            "ts": max(worker.clock.to_local(worker.recording.complete_until_ns) - base_ns, 0) / 1e3,
            "args": {"left_out": left_out},
        }


def _slice(
    recorded: Call | Run, category: str, process: int, thread: int, begun_us: float, arguments: Event
) -> Event:
    """Returns the event of a call or a run."""
    return {
        "ph": "X",
        "cat": category,
        "name": recorded.method,
        "pid": process,
        "tid": thread,
        "ts": begun_us,
        "dur": (recorded.ended_ns - recorded.begun_ns) / 1e3,
        "args": arguments,
    }


def _flow_event(phase: str, caller: int, call: int, process: int, thread: int, time_us: float) -> Event:
    """Returns the beginning or the end of the arrow from a call to the function that it runs."""
    identifier = (caller << FLOW_SHIFT) | call
    end = {"bp": "e"} if phase == "f" else {}
    return {
        "ph": phase,
        "cat": "rpc",
        "name": "call",
        "id": identifier,
        "pid": process,
        "tid": thread,
        "ts": time_us,
        **end,
    }


def _metadata_event(kind: str, process: int, thread: int, arguments: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "ts": 0, "pid": process, "tid": thread, "args": dict(arguments)}
