"""Compares gradwire's engines for process groups with their peers, in one run.

python -m benchmarks.collectives                               # a table on stdout
python -m benchmarks.collectives --engines shm mpi --ranks 2   # these engines, on two ranks
python -m benchmarks.collectives --json FILE                   # and all figures in a file

The shared-memory engine is compared with torch's own Gloo backend, which it replaces on one host. The others are
compared with the library that they drive, called directly: what gradwire costs is the difference. Times
are measured on rank 0.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .backends import BACKENDS, Backend, Tensors
from .calls import KIB, MIB
from .command_line import Report, add_rounds, arguments_of, make_parser
from .harness import Comparison
from .worker_sets import WARM_UP, WorkerSet, preload, take_turns

PEERS = {"shm": "gloo", "gloo": "ProcessGroupGloo", "mpi": "mpi4py"}
"""The backend that each engine is compared with."""

MIN_STEPS, MAX_STEPS = 3, 3000

TIMES = f"{'median':>12}{'p99':>12}{'peer median':>12}{'p99':>12}{'ratio':>8}{'over it':>30}"
HEADER = f"{'engine and ranks':31}{TIMES}"

OPERATIONS = {"all_reduce": 1, "broadcast": 2, "all_gather": 1, "send_recv": 2, "barrier": 1}
"""The measured steps, which are methods of Backend, and how many operations a step is."""


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
    step, operations = getattr(backend, case.operation), OPERATIONS[case.operation]
    mine = torch.zeros(case.size // 4)
    tensors = Tensors(rank, mine, [torch.zeros_like(mine) for _ in range(size)])
    times = []
    warm_up = min(WARM_UP, steps)
    for number in range(warm_up + steps):
        start = time.perf_counter()
        step(tensors)
        if number >= warm_up:
            times.append((time.perf_counter() - start) / operations)
    return times


def compare(case: Case, sets: Sequence[WorkerSet], rounds: int, seconds: float) -> Comparison:
    """Measures an operation on all backends, which take turns."""
    steps = {}
    for worker_set in take_turns(sets, 1):
        one = statistics.median(worker_set.ask_all(_measure, case, MIN_STEPS)[0]) * OPERATIONS[case.operation]
        steps[worker_set.name] = max(MIN_STEPS, min(MAX_STEPS, int(seconds / one)))
    measured: dict[str, list[list[float]]] = {worker_set.name: [] for worker_set in sets}
    for worker_set in take_turns(sets, rounds):
        measured[worker_set.name].append(worker_set.ask_all(_measure, case, steps[worker_set.name])[0])
    return Comparison(str(case), sets[0].size, measured)


def row(comparison: Comparison, engine: str) -> str:
    """Returns a line of the table: an engine against its peer."""
    pair = ours, theirs = f"gradwire_{engine}", PEERS[engine]
    times = "".join(f" {comparison.median(each) * 1e6:11.1f} {comparison.p99(each) * 1e6:11.1f}" for each in pair)
    ratios = comparison.ratios(*pair)
    over = (comparison.median(ours) - comparison.median(theirs)) * 1e6
    return (
        f"{engine:6}{comparison.workers:3}  {comparison.case:20}{times} {comparison.ratio(*pair):7.3f}  "
        f"({min(ratios):.3f} to {max(ratios):.3f}) {over:11.1f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.collectives", __doc__)
    add_rounds(parser, rounds=5, seconds=0.3)
    parser.add_argument("--engines", nargs="+", choices=list(PEERS), default=list(PEERS), help="all of them")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="even numbers (2 4)")
    parser.add_argument("--operations", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    sizes = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, help="bytes of a tensor (1 KiB to 64 MiB)")
    arguments = arguments_of(parser, argv)
    if any(ranks < 2 or ranks % 2 for ranks in arguments.ranks):
        parser.error(f"--ranks are {arguments.ranks}: give even numbers, at least 2")
    text = (
        f"{arguments.rounds} rounds of {arguments.seconds:g} s each; microseconds of an operation, float32; ratio "
        "of the medians, below 1 gradwire is faster; in brackets, the lowest and the highest of a round; and "
        f"their difference. Peers: {', '.join(f'of {engine} {PEERS[engine]}' for engine in arguments.engines)}."
    )
    report = Report(text, HEADER)
    backends = [name for engine in arguments.engines for name in (f"gradwire_{engine}", PEERS[engine])]
    for ranks in arguments.ranks:
        with contextlib.ExitStack() as stack:
            sets = [stack.enter_context(WorkerSet(name, ranks, _start)) for name in backends]
            for case in cases(arguments.operations, arguments.sizes):
                comparison = compare(case, sets, arguments.rounds, arguments.seconds)
                report.print(*(row(comparison, engine) for engine in arguments.engines))
                report.measured.append({"case": str(case), "ranks": ranks, "seconds": comparison.rounds})
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
