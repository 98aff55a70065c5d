"""Reads the flight recorder files of all ranks, and reports which rank is stuck where.

python -m gradwire.c10d.debug.report FILE_OR_FOLDER...
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...net.peer_text import printable_lines

__all__ = ["main", "read_files", "report"]

Json = dict[str, Any]

MAX_REPORT_CHARACTERS = 1 << 24

_STATES = {"in flight": "stuck in", "failed": "failed in", "done": "went on after"}


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.c10d.debug.report", description="Reports which rank is stuck where."
    )
    parser.add_argument("paths", nargs="+", type=Path, help="flight recorder files, or their folder")
    files = read_files(parser.parse_args(arguments).paths)
    if not files:
        parser.error("no such files: flight recorders write flight-HOST-PID.json")
    print(report(files))


if __name__ == "__main__":
    main()
