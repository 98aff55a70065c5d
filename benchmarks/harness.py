"""Measures one program on two systems, in alternating rounds of one run."""

import contextlib
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from .systems import SYSTEMS, System, system_here
from .worker_sets import WARM_UP, WorkerSet, take_turns

__all__ = ["Case", "Comparison", "Results", "compare", "seconds_of"]

Results = list[np.ndarray[Any, Any]]


class Case(ABC):
    """A program to measure; it runs on worker 0 of `workers` workers."""

    name: ClassVar[str]
    workers: ClassVar[int]

    @abstractmethod
    def __init__(self, system: System) -> None:
        """Sets up what the steps share."""

    @abstractmethod
    def step(self) -> float:
        """Runs the measured operation once; returns the seconds it took."""

    @abstractmethod
    def results(self) -> list[torch.Tensor]:
        """Returns what a first step computes, such as gradients; equal on both systems. Called before `step`."""


def seconds_of(function: Callable[[], object]) -> float:
    """Returns the seconds that a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measurements of one case.

    rounds: the seconds of each step, by system and by round.
    results: the results of the first step, by system.
    cpu: the processor seconds of all workers together, by system and by round, with those of the steps that are
        not counted.
    """

    case: str
    workers: int
    rounds: Mapping[str, Sequence[Sequence[float]]]
    results: Mapping[str, Results]
    cpu: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def steps(self, system: str) -> list[float]:
        """Returns the seconds of all steps of a system."""
        return [seconds for one in self.rounds[system] for seconds in one]

    def median(self, system: str) -> float:
        """Returns the median of a system's steps, in seconds."""
        return statistics.median(self.steps(system))

    def p99(self, system: str) -> float:
        """Returns the 99th percentile of a system's steps, in seconds."""
        return float(np.percentile(self.steps(system), 99))

    def cpu_of_step(self, system: str) -> float:
        """Returns the processor seconds that a step takes on all workers together, on average."""
        return sum(self.cpu[system]) / (len(self.steps(system)) + WARM_UP * len(self.rounds[system]))

    @property
    def ratio(self) -> float:
        """The ratio of the medians, first system over second; below 1 the first is faster."""
        first, second = self.rounds
        return self.median(first) / self.median(second)

    @property
    def ratios(self) -> list[float]:
        """The ratio of the medians in each round."""
        first, second = self.rounds.values()
        return [
            statistics.median(one) / statistics.median(other) for one, other in zip(first, second, strict=True)
        ]

    @property
    def difference(self) -> float:
        """The largest absolute difference between two elements of the results."""
        first, second = self.results.values()
        return max(float(np.abs(one - other).max()) for one, other in zip(first, second, strict=True))


def compare(
    cases: Sequence[type[Case]], systems: tuple[System, System], *, rounds: int, seconds: float
) -> Iterator[Comparison]:
    """Measures cases one after another, on two systems.

    Args:
        cases: classes at the top level of modules. Consecutive ones with as many workers share processes.
        systems: the first is compared with the second.
        rounds: rounds of each system.
        seconds: length of a round; at least one step is run.

    Raises:
        AssertionError: the systems do not compute the same.
        RuntimeError: a worker failed; its traceback is in the message.
    """
    with contextlib.ExitStack() as stack:
        sets: list[WorkerSet] = []
        for case in cases:
            if not sets or sets[0].size != case.workers:
                stack.close()
                sets = [stack.enter_context(WorkerSet(system.name, case.workers, _start)) for system in systems]
            yield _compare(case, sets, rounds, seconds)


def _compare(case: type[Case], sets: Sequence[WorkerSet], rounds: int, seconds: float) -> Comparison:
    results: dict[str, Results] = {
        worker_set.name: worker_set.ask(_set_up, case) for worker_set in take_turns(sets, 1)
    }
    for first, *others in zip(*results.values(), strict=True):
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6, err_msg=case.name)
    measured: dict[str, list[list[float]]] = {worker_set.name: [] for worker_set in sets}
    cpu: dict[str, list[float]] = {worker_set.name: [] for worker_set in sets}
    for worker_set in take_turns(sets, rounds):
        before = sum(worker_set.ask_all(time.process_time))
        measured[worker_set.name].append(worker_set.ask(_measure, seconds))
        cpu[worker_set.name].append(sum(worker_set.ask_all(time.process_time)) - before)
    return Comparison(case.name, case.workers, measured, results, cpu)


def _start(system: str, rank: int, size: int, url: str) -> Callable[[], None]:
    SYSTEMS[system].start(rank, size, url)
    return SYSTEMS[system].stop


_case: Case | None = None
"""The case that worker 0 measures."""


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
