"""Reads the flight recorders' files of all ranks, and says who is stuck where.

python -m gradwire.c10d.debug.report FILE_OR_FOLDER...
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "read", "report"]

Record = dict[str, Any]


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of these files, and of those in these folders."""
    files = [file for path in paths for file in (sorted(path.glob("flight-*.json")) if path.is_dir() else [path])]
    return [json.loads(file.read_text()) for file in files]


def report(files: Sequence[Record]) -> str:
    """What the files say about each group, in words."""
    groups: dict[str, dict[int, tuple[Record, Record]]] = defaultdict(dict)
    for file in files:
        for group in file["groups"]:
            groups[group["name"]][group["rank"]] = (group, file)
    return "\n\n".join(_group(name, ranks) for name, ranks in sorted(groups.items()))


def _group(name: str, ranks: dict[int, tuple[Record, Record]]) -> str:
    some, _ = next(iter(ranks.values()))
    lines = [f"group {name!r} ({some['description']}, {some['backend']}), {some['size']} ranks"]
    silent = [str(rank) for rank in range(some["size"]) if rank not in ranks]
    if silent:
        lines.append(f"  no file of rank {', '.join(silent)}: it may have died")
    last = {rank: _last(group, "collective") for rank, (group, _) in ranks.items()}
    numbers = {rank: entry["number"] if entry else 0 for rank, entry in last.items()}
    ahead = max(numbers.values())
    for rank, (group, file) in sorted(ranks.items()):
        lines.append(f"  rank {rank}: {_rank(last[rank], file['written'])}")
        lines += [f"    and in {_shown(entry, file['written'])}" for entry in _messages_under_way(group)]
    behind = [rank for rank, number in numbers.items() if number < ahead]
    if behind:
        reference = next(entry for rank, entry in last.items() if numbers[rank] == ahead and entry)
        lines += [
            f"  rank {rank} has not called collective {numbers[rank] + 1}; others have called "
            f"{_named(ranks, numbers[rank] + 1) or reference['operation']}"
            for rank in sorted(behind)
        ]
    lines += _disagreements(ranks)
    return "\n".join(lines)


def _last(group: Record, kind: str) -> Record | None:
    return next((entry for entry in reversed(group["entries"]) if entry["kind"] == kind), None)


def _messages_under_way(group: Record) -> list[Record]:
    return [e for e in group["entries"] if e["kind"] == "message" and e["state"] == "under way"]


def _rank(entry: Record | None, written: float) -> str:
    if entry is None:
        return "no collective yet"
    where = {"under way": "stuck in", "failed": "failed in", "done": "went on after"}[entry["state"]]
    return f"{where} collective {entry['number']}, {_shown(entry, written)}"


def _shown(entry: Record, written: float) -> str:
    peer = ""
    if entry["peer"] is not None:
        peer = " any rank" if entry["peer"] < 0 else f" rank {entry['peer']}"
    since = f", since {written - entry['began']:.1f} s" if entry["state"] == "under way" else ""
    error = f" ({entry['error']})" if entry["error"] else ""
    return f"{entry['operation']}{peer} of {entry['bytes']} bytes at {entry['place']}{since}{error}"


def _named(ranks: dict[int, tuple[Record, Record]], number: int) -> str:
    """What ranks called as their collective of this number."""
    found = {
        f"{entry['operation']} at {entry['place']}"
        for group, _ in ranks.values()
        for entry in group["entries"]
        if entry["kind"] == "collective" and entry["number"] == number
    }
    return " or ".join(sorted(found))


def _disagreements(ranks: dict[int, tuple[Record, Record]]) -> list[str]:
    """The first collective that not all ranks called alike."""
    called: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (group, _) in sorted(ranks.items()):
        for entry in group["entries"]:
            if entry["kind"] == "collective":
                called[entry["number"]][f"{entry['operation']} ({entry['dtype']})"].append(rank)
    for number, ways in sorted(called.items()):
        if len(ways) > 1:
            told = "; ".join(f"rank {', '.join(map(str, who))}: {what}" for what, who in ways.items())
            return [f"  ranks do not agree on collective {number}: {told}"]
    return []


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.c10d.debug.report", description="says who is stuck where"
    )
    parser.add_argument("paths", nargs="+", type=Path, help="files that flight recorders wrote, or their folder")
    files = read(parser.parse_args(arguments).paths)
    if not files:
        parser.error("no such files: flight recorders write flight-HOST-PID.json")
    print(report(files))


if __name__ == "__main__":
    main()
