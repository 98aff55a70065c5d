"""Measures how many calls a server takes from many callers, and how many a caller sends to many servers.

python -m benchmarks.throughput                              # both, on gradwire and TensorPipe: six minutes
python -m benchmarks.throughput many-to-one --seconds 600    # only this one, for ten minutes on each system
python -m benchmarks.throughput one-to-many --systems gradwire torch-tcp

Each caller keeps 64 calls in flight. Every call has a number, which the server counts and returns: the command
fails if a call is lost, runs twice or gets another answer. The systems run in turns, in one run. Memory is that of
the server that has most.
"""

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .command_line import Report, arguments_of, make_parser, resident_bytes
from .systems import SYSTEMS, start, system_here, worker_name
from .worker_sets import WorkerSet, preload, take_turns

PATTERNS = ["many-to-one", "one-to-many"]

ROUND_S = 20.0
"""Seconds of a turn, at most."""

MIN_ROUNDS = 2

WARM_UP_S = 0.2
"""Seconds of calls before the first turn, which connect all workers."""

MIB = 1 << 20

HEADER = (
    f"{'':12} {'':14}{'calls':>10}{'calls/s':>10}{'us':>10}{'cpu us':>10}{'ratio':>8}{'cpu':>8}"
    f"{'before':>10}{'after':>10}"
)


class CallCounter:
    """Counts the calls that a server runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._sum = 0

    def add(self, number: int) -> None:
        """Counts a call."""
        with self._lock:
            self._calls += 1
            self._sum += number

    def take(self) -> tuple[int, int]:
        """Returns the number of calls since the last time, and the sum of their numbers."""
        with self._lock:
            taken = self._calls, self._sum
            self._calls = self._sum = 0
        return taken


_served = CallCounter()


def serve(number: int) -> int:
    """Runs a call on a server: returns its number."""
    _served.add(number)
    return number


def take_served() -> tuple[int, int]:
    """Returns what this server has counted since the last time."""
    return _served.take()


def call_for(seconds: float, in_flight: int, callers: Sequence[int], servers: Sequence[int]) -> tuple[int, float]:
    """Keeps calls in flight to the servers, in turn, for some seconds, if this worker is one of the callers.

    Returns the number of calls, and the seconds until the last answer.
    """
    rpc = system_here().rpc
    if rpc.get_worker_info().id not in callers:
        return 0, 0.0
    numbers, names = itertools.count(), itertools.cycle([worker_name(rank) for rank in servers])
    begun = time.perf_counter()
    calls = deque(
        (number, rpc.rpc_async(next(names), serve, args=(number,)))
        for number in itertools.islice(numbers, in_flight)
    )
    while calls:
        number, call = calls.popleft()
        if (answer := call.wait()) != number:
            raise AssertionError(f"call {number} is answered with {answer!r}")
        if time.perf_counter() < begun + seconds:
            number = next(numbers)
            calls.append((number, rpc.rpc_async(next(names), serve, args=(number,))))
    return next(numbers), time.perf_counter() - begun


@dataclass(slots=True)
class Throughput:
    """What a system has done in all turns.

    calls: how many were made, answered and run.
    seconds: from the first call of a turn to its last answer, summed over the turns.
    cpu: processor seconds of all workers together.
    bytes_before, bytes_after: resident memory of the server that has most, before and after all turns.
    """

    pattern: str
    system: str
    calls: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0

    @property
    def rate(self) -> float:
        """Calls a second."""
        return self.calls / self.seconds


def measure(pattern: str, systems: Sequence[str], peers: int, in_flight: int, seconds: float) -> list[Throughput]:
    """Measures one pattern on some systems.

    Raises:
        AssertionError: calls were lost, run twice or mixed up.
        RuntimeError: a call or a worker failed.
    """
    ones, many = [0], list(range(1, peers + 1))
    callers, servers = (many, ones) if pattern == PATTERNS[0] else (ones, many)
    rounds = max(MIN_ROUNDS, math.ceil(seconds / ROUND_S))
    measured = {system: Throughput(pattern, system) for system in systems}
    with contextlib.ExitStack() as stack:
        sets = [stack.enter_context(WorkerSet(system, peers + 1, start)) for system in systems]
        for worker_set in take_turns(sets, 1):
            _check(worker_set, worker_set.ask_all(call_for, WARM_UP_S, in_flight, callers, servers))
            measured[worker_set.name].bytes_before = _server_bytes(worker_set, servers)
        for worker_set in take_turns(sets, rounds):
            total = measured[worker_set.name]
            before = sum(worker_set.ask_all(time.process_time))
            done = worker_set.ask_all(call_for, seconds / rounds, in_flight, callers, servers)
            total.cpu += sum(worker_set.ask_all(time.process_time)) - before
            total.calls += _check(worker_set, done)
            total.seconds += max(taken for _, taken in done)
            total.bytes_after = _server_bytes(worker_set, servers)
    return list(measured.values())


def _check(worker_set: WorkerSet, done: Sequence[tuple[int, float]]) -> int:
    """Returns the number of calls that were answered. Raises AssertionError if others were run."""
    answered = [calls for calls, _ in done]
    expected = sum(answered), sum(calls * (calls - 1) // 2 for calls in answered)
    counts = worker_set.ask_all(take_served)
    served = sum(calls for calls, _ in counts), sum(numbers for _, numbers in counts)
    if served != expected:
        raise AssertionError(f"{worker_set.name}: {expected[0]} calls were answered, and {served[0]} were run")
    return expected[0]


def _server_bytes(worker_set: WorkerSet, servers: Sequence[int]) -> int:
    resident: list[int] = worker_set.ask_all(resident_bytes)
    return max(resident[rank] for rank in servers)


def row(measured: Throughput, reference: Throughput) -> str:
    """Returns a line of the table; ratios are those of times per call of `reference` to those of this system."""
    ratio = measured.rate / reference.rate
    cpu = (reference.cpu / reference.calls) / (measured.cpu / measured.calls)
    return (
        f"{measured.pattern:12} {measured.system:14}{measured.calls:10}{measured.rate:10.0f}"
        f"{1e6 / measured.rate:10.1f}{measured.cpu / measured.calls * 1e6:10.1f}{ratio:8.2f}{cpu:8.2f}"
        f"{measured.bytes_before / MIB:10.1f}{measured.bytes_after / MIB:10.1f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.throughput", __doc__)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help=f"{' or '.join(PATTERNS)} (both)")
    parser.add_argument("--peers", type=int, default=8, help="callers of one server, or servers of one caller (8)")
    parser.add_argument("--in-flight", type=int, default=64, help="calls that each caller keeps in flight (64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="on each system (60)")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=list(SYSTEMS),
        default=["gradwire", "torch", "torch-tcp"],
        metavar="SYSTEM",
        help=f"some of {', '.join(SYSTEMS)} (gradwire torch torch-tcp); all are compared with the first",
    )
    arguments = arguments_of(parser, argv)
    if unknown := set(arguments.patterns) - set(PATTERNS):
        parser.error(f"{sorted(unknown)[0]!r} is no pattern: give {' or '.join(PATTERNS)}")
    if not arguments.seconds > 0:
        parser.error(f"--seconds is {arguments.seconds:g}: give more than 0")
    systems = list(dict.fromkeys(arguments.systems))
    text = (
        f"{arguments.in_flight} calls in flight of each caller, to or from {arguments.peers} others, for "
        f"{arguments.seconds:g} s on each system. Times are those of a call, processor times (cpu) those of all "
        f"workers together; ratios are those of {systems[0]} to each system. Memory is in MiB, of a server, "
        "before and after."
    )
    report = Report(text, HEADER)
    for pattern in arguments.patterns or PATTERNS:
        measured = measure(pattern, systems, arguments.peers, arguments.in_flight, arguments.seconds)
        report.print(*(row(each, measured[0]) for each in measured))
        report.measured += [asdict(each) for each in measured]
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
