"""Measures one program on two systems, in turns, in one run.

Each system has a group of processes of its own. A worker of torch's spins on a core even when nobody calls it, so
while one group is measured the other is stopped (SIGSTOP). The groups take turns for several rounds; who goes
first alternates, so that whatever else the machine does meets both alike.
"""

import contextlib
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import torch

from .systems import SYSTEMS, System

__all__ = ["Case", "Comparison", "Results", "compare", "seconds_of"]

WARM_UP = 5
"""Steps at the beginning of each turn that do not count: the first ones wake what has been stopped."""

PATIENCE = 120.0
"""Seconds that a worker may take to answer, beyond those it was told to measure for."""

Results = list[np.ndarray[Any, Any]]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.systems", "torch._dynamo"])  # torch.optim loads the latter late


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
        groups: list[_Group] = []
        for case in cases:
            if not groups or groups[0].size != case.workers:
                stack.close()
                groups = []
                for system in systems:
                    groups.append(stack.enter_context(_Group(system, case.workers)))
                    groups[-1].pause()
            yield _compare(case, groups, rounds, seconds)


def _compare(case: type[Case], groups: Sequence["_Group"], rounds: int, seconds: float) -> Comparison:
    results: dict[str, Results] = {}
    for group in groups:
        with group.running():
            results[group.system.name] = group.ask(_set_up, case)
    for first, *others in zip(*results.values(), strict=True):
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6, err_msg=case.name)
    measured: dict[str, list[list[float]]] = {group.system.name: [] for group in groups}
    for number in range(rounds):
        for group in groups if number % 2 == 0 else reversed(groups):
            with group.running():
                measured[group.system.name].append(group.ask(_measure, seconds))
    return Comparison(case.name, case.workers, measured, results)


class _Group:
    """The worker processes of one system. Worker 0 does what it is asked to; the others serve it."""

    def __init__(self, system: System, size: int) -> None:
        self.system = system
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-benchmark-")
        url = f"file://{self._folder.name}/rendezvous"
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(theirs, system.name, rank, size, url), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def __enter__(self) -> "_Group":
        try:
            for rank in range(self.size):
                self._answer(rank, PATIENCE)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._signal(signal.SIGCONT)
        if kind is None:
            for connection in self._connections:
                connection.send(None)
            for process in self._processes:
                process.join(PATIENCE)
        self._end()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In this block, the processes run."""
        self._signal(signal.SIGCONT)
        yield
        self.pause()

    def pause(self) -> None:
        """Stops the processes, which use no CPU then."""
        self._signal(signal.SIGSTOP)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Has worker 0 run a function."""
        self._connections[0].send((function, args))
        return self._answer(0, PATIENCE)

    def _answer(self, rank: int, patience: float) -> Any:
        who = f"worker {rank} of {self.system.name}"
        if not self._connections[rank].poll(patience):
            raise RuntimeError(f"{who} does not answer for {patience:g} s")
        try:
            value, error = self._connections[rank].recv()
        except EOFError:
            raise RuntimeError(f"{who} has died") from None
        if error:
            raise RuntimeError(f"{who} failed:\n{error}")
        return value

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def _end(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()


_case: Case | None = None
"""What worker 0 measures."""


def _set_up(case: type[Case]) -> Results:
    global _case  # noqa: PLW0603
    from .systems import system_here

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


def _work(connection: Connection, system: str, rank: int, size: int, url: str) -> None:
    """A worker process."""
    SYSTEMS[system].start(rank, size, url)
    connection.send((None, ""))
    while (request := connection.recv()) is not None:
        function, args = request
        try:
            answer = function(*args), ""
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
    SYSTEMS[system].stop()
