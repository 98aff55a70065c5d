"""Compares gradwire's engines for process groups with their peers, in one run.

python -m benchmarks.collectives                               # a table on stdout
python -m benchmarks.collectives --engines shm mpi --ranks 2   # these engines, on two ranks
python -m benchmarks.collectives --json FILE                   # and all figures in a file

The shared-memory engine is compared with torch's own Gloo backend, which it replaces on one host. The others are
compared with the library that they drive, called directly: what gradwire costs is the difference. Times
are measured on rank 0.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .backends import BACKENDS, Backend, Tensors
from .machine import machine_facts
from .worker_sets import WARM_UP, WorkerSet, preload, take_turns

PEERS = {"shm": "gloo", "gloo": "ProcessGroupGloo", "mpi": "mpi4py"}
"""The backend that each engine is compared with."""

MIN_STEPS, MAX_STEPS = 3, 3000

KIB, MIB = 2**10, 2**20


def all_reduce(backend: Backend, tensors: Tensors) -> None:
    """Runs one all_reduce."""
    backend.all_reduce(tensors)


def broadcast(backend: Backend, tensors: Tensors) -> None:
    """Broadcasts from rank 0 and from rank 1, so that rank 0 knows when the first has arrived."""
    backend.broadcast(tensors, 0)
    backend.broadcast(tensors, 1)


def all_gather(backend: Backend, tensors: Tensors) -> None:
    """Runs one all_gather."""
    backend.all_gather(tensors)


def send_recv(backend: Backend, tensors: Tensors) -> None:
    """Sends a tensor there and back, between each even rank and the next."""
    other = tensors.rank ^ 1
    if tensors.rank < other:
        backend.send(tensors, other)
        backend.recv(tensors, other)
    else:
        backend.recv(tensors, other)
        backend.send(tensors, other)


def barrier(backend: Backend, _: Tensors) -> None:
    """Runs one barrier."""
    backend.barrier()


Step = Callable[[Backend, Tensors], None]
STEPS: dict[str, tuple[Step, int]] = {
    "all_reduce": (all_reduce, 1),
    "broadcast": (broadcast, 2),
    "all_gather": (all_gather, 1),
    "send_recv": (send_recv, 2),
    "barrier": (barrier, 1),
}
"""The measured steps by name, and how many operations a step is."""


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on float32 tensors of `size` bytes on each rank."""

    operation: str
    size: int

    def __str__(self) -> str:
        size = f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size // KIB} KiB"
        return self.operation if self.operation == "barrier" else f"{self.operation:11}{size:>8}"


def cases(operations: Sequence[str], sizes: Sequence[int]) -> Iterator[Case]:
    """Yields all combinations; a barrier has no tensors."""
    for operation in operations:
        for size in sizes if operation != "barrier" else [0]:
            yield Case(operation, size)


_here: tuple[Backend, int, int] | None = None
"""The backend that this process measures, its rank and the number of ranks."""


def _start(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    global _here  # noqa: PLW0603
    torch.set_num_threads(1)
    _here = BACKENDS[name](name, rank, size, url), rank, size
    return lambda: os._exit(0)  # at once: the other ranks may have ended already


def _measure(case: Case, steps: int) -> list[float]:
    """Returns the seconds of an operation, in each of `steps` steps."""
    assert _here is not None
    backend, rank, size = _here
    step, operations = STEPS[case.operation]
    mine = torch.zeros(case.size // 4)
    tensors = Tensors(rank, mine, [torch.zeros_like(mine) for _ in range(size)])
    times = []
    warm_up = min(WARM_UP, steps)
    for number in range(warm_up + steps):
        start = time.perf_counter()
        step(backend, tensors)
        if number >= warm_up:
            times.append((time.perf_counter() - start) / operations)
    return times


def compare(case: Case, sets: Sequence[WorkerSet], rounds: int, seconds: float) -> dict[str, list[list[float]]]:
    """Returns the seconds of each step, by backend and round."""
    steps = {}
    for worker_set in take_turns(sets, 1):
        one = statistics.median(worker_set.ask_all(_measure, case, MIN_STEPS)[0]) * STEPS[case.operation][1]
        steps[worker_set.name] = max(MIN_STEPS, min(MAX_STEPS, int(seconds / one)))
    measured: dict[str, list[list[float]]] = {worker_set.name: [] for worker_set in sets}
    for worker_set in take_turns(sets, rounds):
        measured[worker_set.name].append(worker_set.ask_all(_measure, case, steps[worker_set.name])[0])
    return measured


def row(case: Case, ranks: int, engine: str, measured: dict[str, list[list[float]]]) -> str:
    """Returns a line of the table: an engine against its peer."""
    pair = [measured[f"gradwire_{engine}"], measured[PEERS[engine]]]
    ours, theirs = (np.concatenate(rounds) * 1e6 for rounds in pair)
    columns = "".join(f"{np.median(times):12.1f}{np.percentile(times, 99):12.1f}" for times in (ours, theirs))
    ratios = [statistics.median(one) / statistics.median(other) for one, other in zip(*pair, strict=True)]
    return (
        f"{engine:6}{ranks:3}  {case!s:20}{columns}{np.median(ours) / np.median(theirs):8.3f}  "
        f"({min(ratios):.3f} to {max(ratios):.3f}){np.median(ours) - np.median(theirs):12.1f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    arguments = _arguments(argv)
    facts = machine_facts()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(
        f"\n{arguments.rounds} rounds of {arguments.seconds:g} s each; microseconds of an operation, float32; "
        "ratio of the medians,\nbelow 1 gradwire is faster; in brackets, the lowest and the highest of a round; "
        "and their difference\n"
        f"Peers: {', '.join(f'of {engine} {PEERS[engine]}' for engine in arguments.engines)}\n"
    )
    print(
        f"{'engine and ranks':31}{'median':>12}{'p99':>12}{'peer median':>12}{'p99':>12}{'ratio':>8}"
        f"{'':18}{'over it':>12}",
        flush=True,
    )
    figures = []
    backends = [name for engine in arguments.engines for name in (f"gradwire_{engine}", PEERS[engine])]
    for ranks in arguments.ranks:
        with contextlib.ExitStack() as stack:
            sets = [stack.enter_context(WorkerSet(name, ranks, _start)) for name in backends]
            for case in cases(arguments.operations, arguments.sizes):
                measured = compare(case, sets, arguments.rounds, arguments.seconds)
                figures.append({"case": str(case), "ranks": ranks, "seconds": measured})
                for engine in arguments.engines:
                    print(row(case, ranks, engine, measured), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"facts": facts, "cases": figures}))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", nargs="+", choices=list(PEERS), default=list(PEERS), help="all of them")
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
    parser.add_argument("--seconds", type=float, default=0.3, help="that a turn takes (0.3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    arguments = parser.parse_args(argv)
    if any(ranks < 2 or ranks % 2 for ranks in arguments.ranks):
        parser.error(f"--ranks are {arguments.ranks}: give even numbers, at least 2")
    return arguments


if __name__ == "__main__":
    preload()
    main()
