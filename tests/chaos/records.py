"""Records of calls and of runs, in files that outlive the worker that writes them.

A caller writes each call down before it makes it, and its outcome afterwards; a callee writes down each call that
it begins to run. Each line is written by one system call, so a worker that is killed leaves whole lines.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "CALLER_DIED",
    "LOST",
    "NOT_SENT",
    "RAN",
    "SUCCEEDED",
    "UNKNOWN",
    "WRONG",
    "Findings",
    "Record",
    "judge",
    "read_lines",
]

SUCCEEDED, NOT_SENT, UNKNOWN, RAN = "succeeded", "not-sent", "unknown", "has-run"
LOST, WRONG = "lost", "wrong"
"""Outcomes of a call. LOST is none in time; WRONG is a result that is not right, or an error of somebody else."""

CALLER_DIED = "caller-died"

NOT_RUN = frozenset({"fetch", "kept", "backward", "all-gather", "store", "file"})
"""Kinds of operations that run nothing which a callee would write down."""

MAX_EXAMPLES = 5


class Record:
    """A file of lines.

    Args:
        path: of the file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        """Adds a line of words; spaces and line ends in the last one are kept apart from others."""
        line = " ".join(str(word).replace("\n", " | ") for word in words)
        os.write(self._file, line.encode() + b"\n")


@dataclass(slots=True)
class Findings:
    """What the records of a run say.

    calls: the number of calls, by kind and by outcome. Calls whose caller died before it knew their outcome have
        the outcome CALLER_DIED.
    examples: the first calls of each fault, in words.
    doubled: how many calls have run more than once.
    ran_though_not_sent: how many calls have run of which the caller was told that they had not been sent.
    never_ran: how many calls no callee has begun, although they succeeded, or failed as ones that have run.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    doubled: int = 0
    ran_though_not_sent: int = 0
    never_ran: int = 0

    def count(self, outcome: str) -> int:
        """Returns the number of calls with an outcome."""
        return sum(count for (_, each), count in self.calls.items() if each == outcome)

    def add_example(self, fault: str, text: str) -> None:
        """Keeps a call as an example of a fault, unless there are enough."""
        kept = self.examples.setdefault(fault, [])
        if len(kept) < MAX_EXAMPLES:
            kept.append(text)

    @property
    def is_right(self) -> bool:
        """Whether every call had its outcome, once, and the right one."""
        bad = self.count(LOST), self.count(WRONG), self.doubled, self.ran_though_not_sent, self.never_ran
        return not any(bad)


def judge(called: Iterable[str], ran: Iterable[str]) -> Findings:
    """Compares what callers and callees have written down.

    Args:
        called: lines of callers: `made NUMBER KIND CALLEE` before each call, `done NUMBER OUTCOME TEXT` after it,
            and `stopped INCARNATION` when all of an incarnation's calls have ended.
        ran: lines of callees: `NUMBER`.
    """
    findings = Findings()
    runs = Counter(line.split()[0] for line in ran if line.strip())
    made: dict[str, tuple[str, str]] = {}
    done: dict[str, tuple[str, str]] = {}
    stopped: set[str] = set()
    for line in called:
        what, number, *rest = line.rstrip("\n").split(" ", 3)
        entry = rest[0], rest[1] if len(rest) > 1 else ""
        if what == "stopped":
            stopped.add(number)
        elif what == "made":
            made[number] = entry
            stopped.discard(number.rpartition(".")[0])
        elif number not in done or done[number][0] != LOST:
            done[number] = entry
    for number, (kind, callee) in made.items():
        has_stopped = number.rpartition(".")[0] in stopped
        outcome, text = done.get(number, (LOST if has_stopped else CALLER_DIED, ""))
        findings.calls[kind, outcome] += 1
        where = f"{number}, a {kind} of {callee}: {text}"
        if outcome in (LOST, WRONG):
            findings.add_example(outcome, where)
        if outcome == NOT_SENT and runs[number]:
            findings.ran_though_not_sent += 1
            findings.add_example("ran though not sent", where)
        if outcome in (SUCCEEDED, RAN) and not runs[number] and kind not in NOT_RUN:
            findings.never_ran += 1
            findings.add_example("never ran", where)
    for number, count in runs.items():
        if count > 1:
            findings.doubled += 1
            kind, callee = made.get(number, ("?", "?"))
            findings.add_example("doubled", f"{number}, a {kind} of {callee}, has run {count} times")
    return findings


def read_lines(paths: Iterable[Path]) -> Iterator[str]:
    """Yields the lines of files; a last line without its end was not written whole, and is left out."""
    for path in paths:
        with path.open(errors="replace") as file:
            yield from (line for line in file if line.endswith("\n"))
