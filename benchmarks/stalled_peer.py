"""Measures what workers that are stopped or slow cost the worker that calls them.

    python -m benchmarks.stalled_peer                  # a minute
    python -m benchmarks.stalled_peer --seconds 5

A worker calls one that is stopped (SIGSTOP) and one that takes 10 MB/s, as fast as flow control lets it, and times
calls without arguments to a third one, before and during that. It prints the median and the 99th percentile of
these, and how much its memory has grown, next to the bound that flow control sets.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from gradwire import rpc

from .calls import KIB, MIB, noop
from .command_line import Report, arguments_of, make_parser, resident_bytes
from .worker_sets import WorkerSet, preload

CALLER, THIRD, STOPPED, SLOW = NAMES = ["caller", "third", "stopped", "slow"]

BYTES_PER_S = 10_000_000
"""What the slow worker takes."""

MAX_ROUND_S = 10.0
"""Seconds of calls that the caller is asked for at a time."""

SUSPECT_AFTER_S = 3600.0
"""Seconds after which a worker is suspect: calls to one that is fail at once, so that none would wait any more."""

_taking = threading.Lock()


def take(data: torch.Tensor) -> int:
    """Takes a tensor at the rate of the slow worker; returns its bytes."""
    with _taking:
        time.sleep(data.nbytes / BYTES_PER_S)
    return data.nbytes


class Flood(threading.Thread):
    """Makes calls to a worker, as many as flow control lets through, until `stop`."""

    def __init__(self, worker: str, nbytes: int) -> None:
        super().__init__(name=f"calls to {worker}")
        self.worker = worker
        self.calls = 0
        self.highest_in_flight = 0
        self._nbytes = nbytes
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Makes calls."""
        while not self._stopped.is_set():
            rpc.rpc_async(self.worker, take, (torch.zeros(self._nbytes, dtype=torch.uint8),), timeout=0)
            self.calls += 1
            in_flight = rpc.debug_info()["flow_control"][self.worker]["bytes_in_flight"]
            self.highest_in_flight = max(self.highest_in_flight, in_flight)

    def stop(self) -> None:
        """Ends the calls; those that are in flight are still answered."""
        self._stopped.set()
        self.join()


_floods: list[Flood] = []


def begin(process: int, nbytes: int) -> None:
    """Stops the worker of a process, and begins to call it and the slow one."""
    os.kill(process, signal.SIGSTOP)
    _floods.extend(Flood(worker, nbytes) for worker in (STOPPED, SLOW))


def end(process: int) -> list[tuple[str, int, int]]:
    """Has the stopped worker go on, and ends the calls to both.

    Returns:
        For each worker its name, the number of calls, and the most bytes that were in flight.
    """
    os.kill(process, signal.SIGCONT)
    for flood in _floods:
        flood.stop()
    return [(flood.worker, flood.calls, flood.highest_in_flight) for flood in _floods]


def connect() -> int:
    """Connects the caller to all workers; returns the process id of the one to be stopped."""
    for worker in (THIRD, SLOW):
        rpc.rpc_sync(worker, noop)
    return rpc.rpc_sync(STOPPED, os.getpid)


def time_noops(seconds: float) -> tuple[list[float], int]:
    """Calls the third worker for some seconds; returns the seconds of each call, and the most memory in bytes."""
    times, memory = [], resident_bytes()
    last = time.perf_counter() + seconds
    while (start := time.perf_counter()) < last:
        rpc.rpc_sync(THIRD, noop)
        times.append(time.perf_counter() - start)
        if not len(times) % 100:
            memory = max(memory, resident_bytes())
    return times, memory


def start_worker(in_flight: int, _: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group; `in_flight` are bytes that may be in flight to each worker."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 128 * KIB)  # freed blocks go back to the system
    flow_control = rpc.FlowControlOptions(max_in_flight_bytes=in_flight, max_received=16)
    liveness = rpc.Liveness(suspect_after=SUSPECT_AFTER_S)
    options = rpc.RpcBackendOptions(init_method=url, flow_control=flow_control, liveness=liveness)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=size, rpc_backend_options=options)
    return rpc.shutdown


def measure(workers: WorkerSet, seconds: float) -> tuple[np.ndarray, int]:
    """Returns the microseconds of each call to the third worker, and the caller's peak of memory in bytes."""
    times: list[float] = []
    memory = 0
    while seconds > 0:
        more, peak = workers.ask(time_noops, min(MAX_ROUND_S, seconds))
        times += more
        memory = max(memory, peak)
        seconds -= MAX_ROUND_S
    return np.array(times) * 1e6, memory


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.stalled_peer", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the worker is stopped (60)")
    parser.add_argument("--kib", type=int, default=256, help="KiB of the tensor in each call (256)")
    parser.add_argument("--in-flight", type=int, default=64, help="MiB that may be in flight to each worker (64)")
    arguments = arguments_of(parser, argv)
    text = (
        f"Microseconds of calls to a third worker, before and for {arguments.seconds:g} s while two are stalled."
    )
    report = Report(text, f"{'noop to a third worker':24}{'calls':>9}{'median':>12}{'99th':>12}")
    start = partial(start_worker, arguments.in_flight * MIB)
    with WorkerSet("gradwire", len(NAMES), start) as workers, workers.running():
        process = workers.ask(connect)
        measure(workers, min(1.0, arguments.seconds))
        before, memory_before = measure(workers, min(10.0, arguments.seconds))
        workers.ask(begin, process, arguments.kib * KIB)
        during, memory_during = measure(workers, arguments.seconds)
        floods = workers.ask(end, process)
    percentiles = [np.percentile(times, (50, 99)) for times in (before, during)]
    for name, times, (median, high) in zip(("before", "during"), (before, during), percentiles, strict=True):
        report.print(f"{name:24}{len(times):9}{median:9.1f} us{high:9.1f} us")
        report.measured.append({"when": name, "calls": len(times), "median": median / 1e6, "p99": high / 1e6})
    ratios = percentiles[1] / percentiles[0]
    report.print(f"{'ratio':33}{ratios[0]:9.2f}   {ratios[1]:9.2f}")
    for worker, calls, highest in floods:
        report.print(
            f"calls to the {worker + ' worker':14} {calls:7}, "
            f"in flight at most {highest / MIB:7.1f} MiB of {arguments.in_flight} MiB"
        )
    report.print(
        f"the caller's memory grew by {(memory_during - memory_before) / MIB:.1f} MiB; "
        f"bound of what is in flight: {2 * arguments.in_flight} MiB"
    )
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
