"""Measures one program on several systems, in alternating rounds of one run."""

import contextlib
import re
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from .systems import System, start, system_here
from .worker_sets import WARM_UP, Start, WorkerSet, take_turns

__all__ = ["RATIO_HEADER", "Case", "Comparison", "Results", "compare", "measure_rounds", "seconds_of"]

Results = list[np.ndarray[Any, Any]]

RATIO_HEADER = f"  | ratio: {'median':>7}  {'(rounds)':14}{'p99':>7}{'cpu':>7}"
"""The names of the columns of `Comparison.ratio_columns`."""


class Case(ABC):
    """A program to measure; it runs on worker 0 of `workers` workers, named worker0, worker1 and so on.

    name: how the table shows it; the name of the class unless it says otherwise.
    workers: how many it needs.
    calls: how many calls `step` makes; times are those of one.
    """

    name: ClassVar[str]
    workers: ClassVar[int] = 2
    calls: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__name__)

    @classmethod
    def variant(cls, name: str, **attributes: Any) -> "type[Case]":
        """Returns a case with other attributes, at the top level of this one's module so that workers find it."""
        names = {"__module__": cls.__module__, "name": name, **attributes}
        case = type(re.sub(r"\W+", "_", name), (cls,), names)
        setattr(sys.modules[cls.__module__], case.__name__, case)
        return case

    def __init__(self, system: System) -> None:
        """Sets up what the steps share; called once on each system."""
        self._rpc, self._autograd = system.rpc, system.autograd

    @abstractmethod
    def results(self) -> list[torch.Tensor]:
        """Returns what a first step computes, such as gradients; equal on all systems. Called before `step`."""

    def step(self) -> float:
        """Runs the measured operation once; returns the seconds it took. Here: `results`."""
        return seconds_of(self.results)


def seconds_of(function: Callable[[], object]) -> float:
    """Returns the seconds that a function takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measurements of one case.

    rounds: the seconds of each call or other operation, by system and by round.
    results: the results of the first step, by system.
    cpu: the processor seconds of all workers together for one operation, by system and by round.
    """

    case: str
    workers: int
    rounds: Mapping[str, Sequence[Sequence[float]]]
    results: Mapping[str, Results] = field(default_factory=dict)
    cpu: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def median(self, system: str) -> float:
        """Returns the median of a system's times, in seconds."""
        return statistics.median(self._times(system))

    def p99(self, system: str) -> float:
        """Returns the 99th percentile of a system's times, in seconds."""
        return float(np.percentile(self._times(system), 99))

    def cpu_of(self, system: str) -> float:
        """Returns the processor seconds of an operation on all workers together: the median of the rounds."""
        return statistics.median(self.cpu[system])

    def ratio(self, first: str, second: str) -> float:
        """Returns the ratio of two systems' medians; below 1 the first is faster."""
        return self.median(first) / self.median(second)

    def ratios(self, first: str, second: str) -> list[float]:
        """Returns the ratio of two systems' medians in each round."""
        pairs = zip(self.rounds[first], self.rounds[second], strict=True)
        return [statistics.median(one) / statistics.median(other) for one, other in pairs]

    def time_columns(self, system: str) -> str:
        """Returns the number of a system's calls and their times in microseconds, as columns."""
        times = self.median(system), self.p99(system), self.cpu_of(system)
        return f"{sum(map(len, self.rounds[system])):9}" + "".join(f"{each * 1e6:9.1f}" for each in times)

    def ratio_columns(self, first: str, second: str) -> str:
        """Returns the ratios of two systems, as columns: the medians, their rounds, the p99, processor time."""
        ratios = self.ratios(first, second)
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        p99, cpu = self.p99(first) / self.p99(second), self.cpu_of(first) / self.cpu_of(second)
        return f"  |        {statistics.median(ratios):7.3f}  {spread:14}{p99:7.2f}{cpu:7.2f}"

    def figures(self, system: str) -> dict[str, Any]:
        """Returns the figures of a system as JSON values, in seconds."""
        return {
            "system": system,
            "calls": sum(map(len, self.rounds[system])),
            "median": self.median(system),
            "p99": self.p99(system),
            "cpu": self.cpu_of(system),
            "medians of rounds": [statistics.median(each) for each in self.rounds[system]],
        }

    def all_figures(self) -> dict[str, Any]:
        """Returns all figures as JSON values, with the seconds of each step, and the norms of the results."""
        systems = {
            name: {
                **self.figures(name),
                "rounds": self.rounds[name],
                "results": [
                    {"shape": result.shape, "norm": float(np.linalg.norm(result))} for result in self.results[name]
                ],
            }
            for name in self.rounds
        }
        return {"case": self.case, "largest difference of results": self.difference, "systems": systems}

    @property
    def difference(self) -> float:
        """The largest absolute difference between two elements of the systems' results."""
        first, *others = self.results.values()
        pairs = [pair for other in others for pair in zip(first, other, strict=True)]
        return max((float(np.abs(one - other).max()) for one, other in pairs), default=0.0)

    def _times(self, system: str) -> list[float]:
        return [seconds for one in self.rounds[system] for seconds in one]


def compare(
    cases: Sequence[type[Case]],
    systems: Sequence[System],
    *,
    rounds: int,
    seconds: float,
    start: Start = start,
) -> Iterator[Comparison]:
    """Measures cases one after another, each on all systems.

    Args:
        cases: classes at the top level of modules. Consecutive ones with as many workers share processes.
        systems: what to measure them on.
        rounds: of each system.
        seconds: length of a round; at least one step is run.
        start: starts a worker of a system, given its name.

    Raises:
        AssertionError: the systems do not compute the same.
        RuntimeError: a worker failed; its traceback is in the message.
    """
    with contextlib.ExitStack() as stack:
        sets: list[WorkerSet] = []
        for case in cases:
            if not sets or sets[0].size != case.workers:
                stack.close()
                sets = [stack.enter_context(WorkerSet(system.name, case.workers, start)) for system in systems]
            yield _compare(case, sets, rounds, seconds)


def _compare(case: type[Case], sets: Sequence[WorkerSet], rounds: int, seconds: float) -> Comparison:
    results: dict[str, Results] = {
        worker_set.name: worker_set.ask(_set_up, case) for worker_set in take_turns(sets, 1)
    }
    for first, *others in zip(*results.values(), strict=True):
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6, err_msg=case.name)
    return measure_rounds(case, sets, rounds, lambda each: each.ask(_measure, seconds), results)


def measure_rounds(
    case: type[Case],
    sets: Sequence[WorkerSet],
    rounds: int,
    run: Callable[[WorkerSet], tuple[list[float], int]],
    results: Mapping[str, Results] | None = None,
) -> Comparison:
    """Measures a case on several sets of workers, which take turns.

    Args:
        case: what is measured. Only the processor time of the workers that it needs counts.
        sets: the workers of each system.
        rounds: turns of each set.
        run: has a set do it for a turn; returns the seconds of each step, and how many more steps there were.
        results: what the steps compute, by set.
    """
    seconds: dict[str, list[list[float]]] = {worker_set.name: [] for worker_set in sets}
    cpu: dict[str, list[float]] = {worker_set.name: [] for worker_set in sets}
    for worker_set in take_turns(sets, rounds):
        before = sum(worker_set.ask_all(time.process_time)[: case.workers])
        steps, uncounted = run(worker_set)
        used = sum(worker_set.ask_all(time.process_time)[: case.workers]) - before
        seconds[worker_set.name].append([step / case.calls for step in steps])
        cpu[worker_set.name].append(used / (case.calls * (len(steps) + uncounted)))
    return Comparison(case.name, case.workers, seconds, results or {}, cpu)


_case: Case | None = None
"""The case that worker 0 measures."""


def _set_up(case: type[Case]) -> Results:
    global _case  # noqa: PLW0603
    _case = None  # its memory is free before the next one needs as much
    _case = case(system_here())
    return [result.detach().numpy().copy() for result in _case.results()]


def _measure(seconds: float) -> tuple[list[float], int]:
    """Returns the seconds of each step, and the number of steps before them, which are not counted."""
    assert _case is not None
    start = time.perf_counter()
    uncounted = 0
    while not uncounted or (uncounted < WARM_UP and time.perf_counter() < start + seconds / 2):
        _case.step()
        uncounted += 1
    end = time.perf_counter() + seconds
    steps = [_case.step()]
    while time.perf_counter() < end:
        steps.append(_case.step())
    return steps, uncounted
