"""What came of a run, and whether that is good."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.chaos.cluster import Deaths
from tests.chaos.member import Figures
from tests.chaos.records import Findings

__all__ = ["Verdict", "compare_gathers", "find_leaks"]

MUST_BE_ZERO = ("agent.", "num_")
"""How the names of what an agent counts begin."""

SLACK = {
    "fd socket": 8,
    "fd memfd": 64,
    "fd file": 4,
    "fd pipe": 2,
    "fd eventfd": 4,
    "fd eventpoll": 4,
    "MiB": 250,
    "thread gradwire-waits-worker#": 1,
    "threads": 24,
}
"""By how much a figure may differ from what it was before the faults. Connections and pooled segments differ with
what a worker has sent to whom, and executor threads with how many calls there were at a time. The clock of
requests that wait for values starts with the first of them."""

POOLED_THREADS = ("thread gradwire-worker", "thread asyncio")


@dataclass(slots=True)
class Verdict:
    """What came of a run.

    findings: what the records say.
    gathers: contradictions between the results of all_gathers.
    deaths: what has become of processes.
    leaks: what workers kept after the load.
    left: what was left when all workers had exited.
    threads_left: threads that were left after `shutdown`.
    growth: of what workers without faults have had more and more.
    thirds: what these have had, by worker and kind: the median of each third of the run.
    stuck: which phase did not end; empty if all did.
    figures: the most that a worker had, before and after the faults.
    """

    findings: Findings = field(default_factory=Findings)
    gathers: list[str] = field(default_factory=list)
    deaths: Deaths = field(default_factory=Deaths)
    leaks: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    threads_left: list[str] = field(default_factory=list)
    growth: list[str] = field(default_factory=list)
    thirds: dict[str, dict[str, tuple[float, float, float]]] = field(default_factory=dict)
    stuck: str = ""
    figures: list[dict[str, int]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, doubled, wrong, or left."""
        bad = self.gathers, self.deaths.crashes, self.leaks, self.left, self.threads_left, self.growth, self.stuck
        return self.findings.is_right and not any(bad)


def find_leaks(figures: Mapping[str, Figures], before: Mapping[str, int]) -> list[str]:
    """Returns what workers have too much of, in words.

    Args:
        figures: of each worker.
        before: the most that any worker had, by kind; empty if these are the first figures.
    """
    leaks = []
    for name, each in figures.items():
        for kind, count in each.items():
            if kind.startswith(MUST_BE_ZERO):
                allowed = 0
            elif not before or kind.startswith(POOLED_THREADS):
                continue
            else:
                allowed = before.get(kind, 0) + SLACK.get(kind, 0)
                if kind == "fd eventfd":  # by which each of these threads waits, from its first wait on
                    allowed += sum(n for other, n in each.items() if other.startswith(POOLED_THREADS))
            if count > allowed:
                leaks.append(f"{name}: {kind}: {count}, may be {allowed}")
    return leaks


def compare_gathers(lines: Iterable[str]) -> list[str]:
    """Returns contradictions between results of all_gathers, in words.

    If the results of two workers have the values of each other, then all of both must be the same.

    Args:
        lines: `OWN VALUE VALUE …`: the own value of a worker, and all that it has gathered.
    """
    results = {}
    for line in lines:
        own, *values = line.split()
        results[own] = values
    return [
        f"{own} has {' '.join(values)}, but {other} has {' '.join(results[other])}"
        for own, values in results.items()
        for other in values
        if own < other and own in results.get(other, ()) and results[other] != values
    ]
