"""Measures one program on two systems, in turns, in one run."""

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from .systems import SYSTEMS, System, system_here
from .team import WARM_UP, Team, turns

__all__ = ["Case", "Comparison", "Results", "compare", "seconds_of"]

Results = list[np.ndarray[Any, Any]]


class Case(ABC):
    """A program to measure. It is made, and then runs, on worker 0 of `workers`."""

    name: ClassVar[str]
    workers: ClassVar[int]

    @abstractmethod
    def __init__(self, system: System) -> None:
        """Sets up what all steps share."""

    @abstractmethod
    def step(self) -> float:
        """Does once what is measured. Returns how many seconds it took."""

    @abstractmethod
    def results(self) -> list[torch.Tensor]:
        """What a first step computes, gradients above all: the same on both systems. Called before any step."""


def seconds_of(function: Callable[[], object]) -> float:
    """How long a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured of one case.

    rounds: by system, and by round, the seconds that each step took.
    results: by system, what its first step computed.
    """

    case: str
    workers: int
    rounds: Mapping[str, Sequence[Sequence[float]]]
    results: Mapping[str, Results]

    def steps(self, system: str) -> list[float]:
        """The seconds of all steps."""
        return [seconds for one in self.rounds[system] for seconds in one]

    def median(self, system: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.steps(system))

    def p99(self, system: str) -> float:
        """Seconds that one step in a hundred takes longer than."""
        return float(np.percentile(self.steps(system), 99))

    @property
    def ratio(self) -> float:
        """Of the medians, first system over second; below 1 the first is faster."""
        first, second = self.rounds
        return self.median(first) / self.median(second)

    @property
    def ratios(self) -> list[float]:
        """That of each round."""
        first, second = self.rounds.values()
        return [
            statistics.median(one) / statistics.median(other) for one, other in zip(first, second, strict=True)
        ]

    @property
    def difference(self) -> float:
        """The largest between two elements of the results."""
        first, second = self.results.values()
        return max(float(np.abs(one - other).max()) for one, other in zip(first, second, strict=True))


def compare(
    cases: Sequence[type[Case]], systems: tuple[System, System], *, rounds: int, seconds: float
) -> Iterator[Comparison]:
    """Measures cases one after another, on two systems.

    Args:
        cases: classes at the top level of modules. Those next to each other with as many workers share processes.
        systems: the first is compared with the second.
        rounds: turns of each system.
        seconds: how long a turn takes; at least one step is made.

    Raises:
        AssertionError: the two do not compute the same.
        RuntimeError: a worker failed; its traceback is in the message.
    """
    with contextlib.ExitStack() as stack:
        teams: list[Team] = []
        for case in cases:
            if not teams or teams[0].size != case.workers:
                stack.close()
                teams = [stack.enter_context(Team(system.name, case.workers, _start)) for system in systems]
            yield _compare(case, teams, rounds, seconds)


def _compare(case: type[Case], teams: Sequence[Team], rounds: int, seconds: float) -> Comparison:
    results: dict[str, Results] = {team.name: team.ask(_set_up, case) for team in turns(teams, 1)}
    for first, *others in zip(*results.values(), strict=True):
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6, err_msg=case.name)
    measured: dict[str, list[list[float]]] = {team.name: [] for team in teams}
    for team in turns(teams, rounds):
        measured[team.name].append(team.ask(_measure, seconds))
    return Comparison(case.name, case.workers, measured, results)


def _start(system: str, rank: int, size: int, url: str) -> Callable[[], None]:
    SYSTEMS[system].start(rank, size, url)
    return SYSTEMS[system].stop


_case: Case | None = None
"""What worker 0 measures."""


def _set_up(case: type[Case]) -> Results:
    global _case  # noqa: PLW0603
    _case = case(system_here())
    return [result.detach().numpy().copy() for result in _case.results()]


def _measure(seconds: float) -> list[float]:
    assert _case is not None
    for _ in range(WARM_UP):
        _case.step()
    end = time.perf_counter() + seconds
    steps = [_case.step()]
    while time.perf_counter() < end:
        steps.append(_case.step())
    return steps
