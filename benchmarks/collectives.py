"""Compares gradwire's engines for process groups with torch's own Gloo, in one run.

python -m benchmarks.collectives                               # a table on stdout
python -m benchmarks.collectives --engines shm mpi --ranks 2   # these engines, on two ranks
python -m benchmarks.collectives --json FILE                   # and all figures in a file

Each backend has a group of processes of its own on this host. While one group is measured the others are stopped
(SIGSTOP). The groups take turns for several rounds; who goes first changes, so that whatever else the machine does
meets all alike. Times are those that rank 0 sees.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gradwire
import gradwire.c10d
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

PEER = "gloo"
"""torch's backend that the others are compared with."""

WARM_UP = 5
"""Steps at the beginning of each turn that do not count: the first ones wake what has been stopped."""

MOST_STEPS = 3000
PATIENCE = 120.0
"""Seconds that a process may take to answer."""

KIB, MIB = 2**10, 2**20

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "gradwire.c10d"])


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one rank works on: its own tensor, and one for each rank's."""

    rank: int
    mine: Tensor
    everybody: list[Tensor]


def all_reduce(tensors: Tensors) -> None:
    """The sum of all, everywhere."""
    dist.all_reduce(tensors.mine)


def broadcast(tensors: Tensors) -> None:
    """There and back, so that rank 0 sees when it has arrived."""
    dist.broadcast(tensors.mine, 0)
    dist.broadcast(tensors.mine, 1)


def all_gather(tensors: Tensors) -> None:
    """Everybody's tensor, everywhere."""
    dist.all_gather(tensors.everybody, tensors.mine)


def send_recv(tensors: Tensors) -> None:
    """There and back, between each even rank and the next."""
    other = tensors.rank ^ 1
    if tensors.rank < other:
        dist.send(tensors.mine, other)
        dist.recv(tensors.mine, other)
    else:
        dist.recv(tensors.mine, other)
        dist.send(tensors.mine, other)


def barrier(_: Tensors) -> None:
    """Nothing but waiting."""
    dist.barrier()


Step = Callable[[Tensors], None]
STEPS: dict[str, tuple[Step, int]] = {
    "all_reduce": (all_reduce, 1),
    "broadcast": (broadcast, 2),
    "all_gather": (all_gather, 1),
    "send_recv": (send_recv, 2),
    "barrier": (barrier, 1),
}
"""By name, what is measured, and how many operations that is."""


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on tensors of so many bytes on each rank."""

    operation: str
    size: int

    def __str__(self) -> str:
        size = f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size // KIB} KiB"
        return self.operation if self.operation == "barrier" else f"{self.operation:11}{size:>8}"


def cases(operations: Sequence[str], sizes: Sequence[int]) -> Iterator[Case]:
    """All of them; a barrier has no tensors."""
    for operation in operations:
        for size in sizes if operation != "barrier" else [0]:
            yield Case(operation, size)


class Group:
    """The processes of one backend, stopped but while they are asked for something."""

    def __init__(self, backend: str, size: int) -> None:
        self.backend = backend
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-benchmark-")
        url = f"file://{self._folder.name}/rendezvous"
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(theirs, backend, rank, size, url), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)
        for rank in range(size):
            self._answer(rank)
        self._signal(signal.SIGSTOP)

    def measure(self, case: Case, steps: int) -> list[float]:
        """Seconds of an operation, in each of so many steps."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send((case, steps))
        times, *_ = [self._answer(rank) for rank in range(len(self._connections))]
        self._signal(signal.SIGSTOP)
        return times

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()

    def _answer(self, rank: int) -> list[float]:
        who = f"rank {rank} of {self.backend}"
        if not self._connections[rank].poll(PATIENCE):
            raise RuntimeError(f"{who} does not answer for {PATIENCE:g} s")
        try:
            times, error = self._connections[rank].recv()
        except EOFError:
            raise RuntimeError(f"{who} has died") from None
        if error:
            raise RuntimeError(f"{who} failed:\n{error}")
        return times  # type: ignore[no-any-return]

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)


def _work(connection: Connection, backend: str, rank: int, size: int, url: str) -> None:
    """A process of a group."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)
    connection.send(([], ""))
    while True:
        case, steps = connection.recv()
        try:
            connection.send((_measure(case, steps, rank, size), ""))
        except Exception:
            connection.send(([], traceback.format_exc()))


def _measure(case: Case, steps: int, rank: int, size: int) -> list[float]:
    step, operations = STEPS[case.operation]
    mine = torch.zeros(case.size // 4)
    tensors = Tensors(rank, mine, [torch.zeros_like(mine) for _ in range(size)])
    times = []
    for number in range(WARM_UP + steps):
        start = time.perf_counter()
        step(tensors)
        if number >= WARM_UP:
            times.append((time.perf_counter() - start) / operations)
    return times


def compare(case: Case, groups: Sequence[Group], rounds: int, seconds: float) -> dict[str, list[list[float]]]:
    """By backend and round, the seconds of each step."""
    steps = {}
    for group in groups:
        one = statistics.median(group.measure(case, 5)) * STEPS[case.operation][1]
        steps[group.backend] = max(5, min(MOST_STEPS, int(seconds / one)))
    measured: dict[str, list[list[float]]] = {group.backend: [] for group in groups}
    for number in range(rounds):
        for group in groups if number % 2 == 0 else reversed(groups):
            measured[group.backend].append(group.measure(case, steps[group.backend]))
    return measured


def row(case: Case, ranks: int, backend: str, measured: dict[str, list[list[float]]]) -> str:
    """A line of the table: a backend against torch's."""
    columns = ""
    for name in (backend, PEER):
        times = np.concatenate(measured[name]) * 1e6
        columns += f"{np.median(times):12.1f}{np.percentile(times, 99):12.1f}"
    ratios = [
        statistics.median(mine) / statistics.median(its)
        for mine, its in zip(measured[backend], measured[PEER], strict=True)
    ]
    ratio = np.median(np.concatenate(measured[backend])) / np.median(np.concatenate(measured[PEER]))
    name = backend.removeprefix("gradwire_")
    return f"{name:6}{ranks:3}  {case!s:20}{columns}{ratio:8.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    """The command line."""
    arguments = _arguments()
    facts = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "gradwire": gradwire.__version__,
        "torch": torch.__version__,
        "load average before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(
        f"\n{arguments.rounds} rounds of {arguments.seconds:g} s each; microseconds of an operation, float32; "
        "ratio of the medians,\nbelow 1 gradwire is faster; in brackets, the lowest and the highest of a round\n"
    )
    print(
        f"{'engine and ranks':31}{'median':>12}{'p99':>12}{'Gloo median':>12}{'p99':>12}{'ratio':>8}", flush=True
    )
    everything = []
    backends = [f"gradwire_{engine}" for engine in arguments.engines]
    for ranks in arguments.ranks:
        groups: list[Group] = []
        try:
            for backend in (*backends, PEER):
                groups.append(Group(backend, ranks))
            for case in cases(arguments.operations, arguments.sizes):
                measured = compare(case, groups, arguments.rounds, arguments.seconds)
                everything.append({"case": str(case), "ranks": ranks, "seconds": measured})
                for backend in backends:
                    print(row(case, ranks, backend, measured), flush=True)
        finally:
            for group in groups:
                group.close()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"facts": facts, "cases": everything}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", nargs="+", default=["shm"], help="of gradwire (shm)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="even numbers (2 4)")
    parser.add_argument("--operations", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=[KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB],
        help="bytes of a tensor (1 KiB to 64 MiB)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each group (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a turn takes (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    arguments = parser.parse_args()
    if any(ranks < 2 or ranks % 2 for ranks in arguments.ranks):
        parser.error(f"--ranks are {arguments.ranks}: give even numbers, at least 2")
    return arguments


if __name__ == "__main__":
    main()
