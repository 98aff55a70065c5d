"""Measures what workers cost that have nothing to do: their start, their processor time and their threads.

python -m benchmarks.idle                                  # 32 workers, all connected to each other
python -m benchmarks.idle --workers 8 --systems gradwire torch torch-tcp

Each worker calls each other one once, so that all pairs are connected. After a pause, the processor time of every
worker is measured for 20 s.
"""

import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from .command_line import Report, arguments_of, make_parser
from .systems import SYSTEMS, start, system_here, worker_name
from .worker_sets import WorkerSet, preload

HEADER = (
    f"{'':14}{'workers':>8}{'start s':>10}{'connect s':>10}{'cpu median':>12}{'cpu max':>10}{'threads':>9}"
    f"{'Python':>9}{'first':>9}"
)


@dataclass(frozen=True, slots=True)
class Idle:
    """The cost of a group of workers that do nothing.

    start_s: seconds to fork all of them, and until all have joined.
    connect_s: seconds until each has called each other one.
    cpu: the share of a core that each worker uses while idle.
    threads: the largest number of threads of a worker, those of C++ libraries included.
    python_threads: the largest number of Python threads of a worker.
    first_threads: the largest number of threads of a worker right after these calls, before idle ones end.
    """

    system: str
    workers: int
    start_s: float
    connect_s: float
    cpu: Sequence[float]
    threads: int
    python_threads: int
    first_threads: int


def call_each(size: int) -> None:
    """Calls each worker once, this one aside."""
    rpc = system_here().rpc
    me = rpc.get_worker_info().id
    for call in [rpc.rpc_async(worker_name(rank), os.getpid) for rank in range(size) if rank != me]:
        call.wait()


def thread_count() -> int:
    """Returns the number of threads of this worker, those of C++ libraries included."""
    return psutil.Process().num_threads()


def measure(system: str, workers: int, pause: float, seconds: float) -> Idle:
    """Starts a group of workers and measures them for some seconds, after a pause behind the last call."""
    begun = time.perf_counter()
    with WorkerSet(system, workers, start) as worker_set:
        start_s = time.perf_counter() - begun
        with worker_set.running():
            begun = time.perf_counter()
            worker_set.ask_all(call_each, workers)
            connect_s = time.perf_counter() - begun
            first_threads = max(worker_set.ask_all(thread_count))
            time.sleep(pause)
            before, begun = worker_set.ask_all(time.process_time), time.perf_counter()
            time.sleep(seconds)
            taken = time.perf_counter() - begun
            after = worker_set.ask_all(time.process_time)
            cpu = [(now - then) / taken for then, now in zip(before, after, strict=True)]
            threads = max(worker_set.ask_all(thread_count))
            python_threads = max(worker_set.ask_all(threading.active_count))
    return Idle(system, workers, start_s, connect_s, cpu, threads, python_threads, first_threads)


def row(idle: Idle) -> str:
    """Returns a line of the table."""
    return (
        f"{idle.system:14}{idle.workers:8}{idle.start_s:10.2f}{idle.connect_s:10.2f}"
        f"{statistics.median(idle.cpu) * 100:12.3f}{max(idle.cpu) * 100:10.3f}"
        f"{idle.threads:9}{idle.python_threads:9}{idle.first_threads:9}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.idle", __doc__)
    parser.add_argument("--workers", type=int, default=32, help="in the group (32)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=["gradwire"], help="(gradwire)")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before the measurement (3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the measurement (20)")
    arguments = arguments_of(parser, argv)
    text = (
        "Seconds until all workers have joined, and until each has called each other one; processor time of "
        f"an idle worker over {arguments.seconds:g} s, in % of a core; its threads, those that run Python, and "
        "how many there were right after the first calls."
    )
    report = Report(text, HEADER)
    for system in arguments.systems:
        idle = measure(system, arguments.workers, arguments.pause, arguments.seconds)
        report.print(row(idle))
        report.measured.append(asdict(idle))
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
