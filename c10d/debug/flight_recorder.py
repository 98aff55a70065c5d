"""A flight recorder: the last operations of each group, to find out where it hangs.

Every group keeps its last operations in a ring buffer. They are written to a file on request, or when the group
fails, if its options name a folder. `report`, which `gradwire flight` prints, says from the files of all ranks
which of them is stuck where.
"""

import itertools
import json
import os
import socket
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

from ...net.peer_text import printable_lines
from ..engines.base import PendingOperation, peek
from ..engines.collective_call import CollectiveCall
from .call_site import CallSite, find_call_site

__all__ = ["FlightRecord", "FlightRecorder", "read_files", "report", "write_flight_records"]

_FRAMES_IN_GRADWIRE = 4
"""Stack frames between `find_call_site` and the caller of a collective: `FlightRecorder.begin`, `GroupCore.start`,
`ProcessGroup.start`, and the collective's method. There are no others if C++ calls it on a thread of its own."""

MAX_REPORT_CHARACTERS = 1 << 24

_STATES = {"in flight": "stuck in", "failed": "failed in", "done": "went on after"}

Json = dict[str, Any]


@final
class FlightRecord:
    """One operation of a group as this rank called it. It keeps no tensors.

    number: among the collectives of the group, or among its point-to-point operations; counted from 1.
    peer: of a point-to-point operation; None for a collective.
    pending: the operation, while it is needed to ask whether it is done.
    """

    def __init__(self, number: int, call: CollectiveCall, call_site: CallSite) -> None:
        self.number = number
        self.name = call.name
        self.call_site = call_site
        self.peer = call.peer
        self.pending: PendingOperation | None = None
        inputs = [tensor.shape for tensor in call.inputs]
        self._details = (
            inputs,
            inputs if call.outputs is call.inputs else [tensor.shape for tensor in call.outputs],
            (call.inputs or call.outputs)[0].dtype if call.inputs or call.outputs else None,
            call.reduction.name if call.reduction else None,
            call.root,
            call.tag,
        )
        self._began = time.time()
        self._ended: float | None = None
        self._is_done = False
        self._error: str | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Records that the operation has ended, and with which error."""
        self._ended = time.time()
        if error is not None:
            self._error = f"{type(error).__name__}: {error}"

    def state(self) -> str:
        """Returns `"in flight"`, `"done"` or `"failed"`, without affecting the operation.

        A message of Gloo is in flight until some thread has waited for it, as Gloo tells nobody else of its end.
        """
        if self._error is not None:
            return "failed"
        done = self._ended is not None or self._is_done or (self.pending is not None and peek(self.pending))
        return "done" if done else "in flight"

    def release_operation(self) -> None:
        """Drops the reference to the operation, whose group has closed. The state recorded so far is kept."""
        pending, self.pending = self.pending, None
        if self._ended is None and pending is not None and self.peer is None and pending.done():
            self._is_done = True

    def as_json(self) -> dict[str, Any]:
        """Returns the record as JSON values.

        Times are in seconds since 1970. `ended` is null if nobody has observed the end.
        """
        inputs, outputs, dtype, reduction, root, tag = self._details
        return {
            "number": self.number,
            "operation": self.name,
            "kind": "collective" if self.peer is None else "point_to_point",
            "state": self.state(),
            "error": self._error,
            "began": self._began,
            "ended": self._ended,
            "call_site": f"{self.call_site[0]}:{self.call_site[1]}",
            "inputs": [list(shape) for shape in inputs],
            "outputs": [list(shape) for shape in outputs],
            "bytes": sum(shape.numel() for shape in inputs) * dtype.itemsize if dtype else 0,
            "dtype": str(dtype).removeprefix("torch.") if dtype else None,
            "reduction": reduction,
            "root": root,
            "peer": self.peer,
            "tag": None if self.peer is None else tag,
        }


@final
class FlightRecorder:
    """The last operations of one group on this rank. Any thread may use it.

    collectives: number of collectives called so far. One thread at a time calls the collectives of a group.
    """

    def __init__(self, capacity: int) -> None:
        self._records: deque[FlightRecord] = deque(maxlen=capacity)
        self.collectives = 0
        self._point_to_point_numbers = itertools.count(1)

    def begin(self, call: CollectiveCall) -> FlightRecord:
        """Adds a record for a call that begins."""
        if call.peer is None:
            number = self.collectives = self.collectives + 1
        else:
            number = next(self._point_to_point_numbers)
        record = FlightRecord(number, call, find_call_site(skip=_FRAMES_IN_GRADWIRE))
        self._records.append(record)
        return record

    def peers_in_flight(self) -> set[int | None]:
        """Returns the peers of the operations in flight: None for a collective, ANY_RANK for any rank."""
        return {record.peer for record in list(self._records) if record.state() == "in flight"}

    def in_flight(self) -> list[PendingOperation]:
        """Returns the operations in flight, except receives."""
        return [
            record.pending
            for record in list(self._records)
            if record.pending is not None and record.name != "recv" and record.state() == "in flight"
        ]

    def release_operations(self) -> None:
        """Drops the references to all operations, which refer to engines. The records stay."""
        for record in list(self._records):
            record.release_operation()

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the records as JSON values, oldest first."""
        return [record.as_json() for record in list(self._records)]


def write_flight_records(groups: list[dict[str, Any]], folder: Path) -> Path:
    """Writes the flight records of groups, as JSON values, to a file of this process, and returns its path.

    The file replaces what is at its path, `folder/flight-HOST-PID.json`, also a symbolic link; only the user can
    read it. If it cannot be written, OSError is raised, and nothing is at its path that was not there before.
    """
    content = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "groups": groups,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flight-{content['host']}-{content['pid']}.json"
    descriptor, written = tempfile.mkstemp(dir=folder, prefix=f"{path.name}.")
    try:
        with open(descriptor, "w") as file:
            file.write(json.dumps(content))
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise
    return path


def read_files(paths: Iterable[Path]) -> list[Json]:
    """Returns the contents of flight recorder files, given by their paths or by their folders'."""
    files = [file for path in paths for file in (sorted(path.glob("flight-*.json")) if path.is_dir() else [path])]
    return [json.loads(file.read_text()) for file in files]


def report(files: Sequence[Json]) -> str:
    """Returns a report on each group that the files describe, as text that can be shown in a terminal."""
    groups: dict[str, dict[int, tuple[Json, Json]]] = defaultdict(dict)
    for file in files:
        for group in file["groups"]:
            groups[group["name"]][group["rank"]] = (group, file)
    text = "\n\n".join(_report_group(name, ranks) for name, ranks in sorted(groups.items()))
    return printable_lines(text, MAX_REPORT_CHARACTERS)


def _report_group(name: str, ranks: dict[int, tuple[Json, Json]]) -> str:
    """Reports on one group, given by rank the record of the group and the file that has it."""
    some, _ = next(iter(ranks.values()))
    lines = [f"group {name!r} ({some['description']}, {some['backend']}), {some['size']} ranks"]
    absent = [str(rank) for rank in range(some["size"]) if rank not in ranks]
    if absent:
        lines.append(f"  no file of rank {', '.join(absent)}: it may have died")
    last = {rank: _last_collective(group) for rank, (group, _) in ranks.items()}
    numbers = {rank: record["number"] if record else 0 for rank, record in last.items()}
    newest = max(numbers.values())
    for rank, (group, file) in sorted(ranks.items()):
        lines.append(f"  rank {rank}: {_describe_last(last[rank], file['written'])}")
        lines += [f"    and in {_describe(record, file['written'])}" for record in _pending_messages(group)]
    behind = [rank for rank, number in numbers.items() if number < newest]
    if behind:
        reference = next(record for rank, record in last.items() if numbers[rank] == newest and record)
        lines += [
            f"  rank {rank} has not called collective {numbers[rank] + 1}; others have called "
            f"{_calls_of(ranks, numbers[rank] + 1) or reference['operation']}"
            for rank in sorted(behind)
        ]
    lines += _disagreement(ranks)
    return "\n".join(lines)


def _last_collective(group: Json) -> Json | None:
    return next((record for record in reversed(group["operations"]) if record["kind"] == "collective"), None)


def _pending_messages(group: Json) -> list[Json]:
    return [e for e in group["operations"] if e["kind"] == "point_to_point" and e["state"] == "in flight"]


def _describe_last(record: Json | None, written: float) -> str:
    if record is None:
        return "no collective yet"
    return f"{_STATES[record['state']]} collective {record['number']}, {_describe(record, written)}"


def _describe(record: Json, written: float) -> str:
    peer = ""
    if record["peer"] is not None:
        peer = " any rank" if record["peer"] < 0 else f" rank {record['peer']}"
    since = f", since {written - record['began']:.1f} s" if record["state"] == "in flight" else ""
    error = f" ({record['error']})" if record["error"] else ""
    return f"{record['operation']}{peer} of {record['bytes']} bytes at {record['call_site']}{since}{error}"


def _calls_of(ranks: dict[int, tuple[Json, Json]], number: int) -> str:
    """Describes what ranks called as their collective of this number."""
    found = {
        f"{record['operation']} at {record['call_site']}"
        for group, _ in ranks.values()
        for record in group["operations"]
        if record["kind"] == "collective" and record["number"] == number
    }
    return " or ".join(sorted(found))


def _disagreement(ranks: dict[int, tuple[Json, Json]]) -> list[str]:
    """Returns a line on the first collective that the ranks called differently; no line if there is none."""
    called: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (group, _) in sorted(ranks.items()):
        for record in group["operations"]:
            if record["kind"] == "collective":
                called[record["number"]][f"{record['operation']} ({record['dtype']})"].append(rank)
    for number, calls in sorted(called.items()):
        if len(calls) > 1:
            text = "; ".join(f"rank {', '.join(map(str, ranks))}: {call}" for call, ranks in calls.items())
            return [f"  ranks do not agree on collective {number}: {text}"]
    return []
