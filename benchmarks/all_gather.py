"""Compares `rpc.barrier` and `rpc.all_gather` over messages and over a process group, in one run.

python -m benchmarks.all_gather                          # a table on stdout
python -m benchmarks.all_gather --workers 8 --seconds 1  # eight workers, rounds of one second

Each variant has workers of its own on this host; the variants run in turns. Times are measured on worker 0.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gradwire import rpc

from .harness import Comparison
from .worker_sets import WARM_UP, WorkerSet, preload, take_turns

GROUP, MESSAGES = VARIANTS = "group", "messages"

MAX_ROUNDS = 3000

SIZES = {"barrier": 0, "all_gather of 100 B": 100, "all_gather of 1 MiB": 2**20}
"""Bytes of each worker's value, by case."""


def start(variant: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group, and waits for the process group where the variant has one."""
    torch.set_num_threads(1)
    all_gather = rpc.AllGatherOptions(enabled=variant == GROUP, after=1)
    options = rpc.RpcBackendOptions(init_method=url, all_gather=all_gather)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    while variant == GROUP and sum(rpc.all_gather(rpc.debug_info()["all_gather_groups"]).values()) < size:
        time.sleep(0.01)  # it forms in the background
    return rpc.shutdown


def measure(case: str, rounds: int) -> list[float]:
    """Returns the seconds of each round."""
    value = np.random.default_rng().bytes(SIZES[case])
    taken = []
    for _ in range(WARM_UP + rounds):
        begun = time.perf_counter()
        gathered = rpc.barrier() if case == "barrier" else rpc.all_gather(value)
        taken.append(time.perf_counter() - begun)
        assert gathered is None or gathered[rpc.get_worker_info().name] == value
    return taken[WARM_UP:]


def compare(case: str, sets: Sequence[WorkerSet], rounds: int, seconds: float) -> Comparison:
    """Measures both variants of a case."""
    steps = {}
    for worker_set in take_turns(sets, 1):
        one = statistics.median(worker_set.ask_all(measure, case, 5)[0])
        steps[worker_set.name] = max(5, min(MAX_ROUNDS, int(seconds / one)))
    measured: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
    for worker_set in take_turns(sets, rounds):
        measured[worker_set.name].append(worker_set.ask_all(measure, case, steps[worker_set.name])[0])
    return Comparison(case, sets[0].size, measured)


def row(comparison: Comparison) -> str:
    """Returns a line of the table."""
    columns = "".join(
        f"{comparison.median(variant) * 1e3:14.3f}{comparison.p99(variant) * 1e3:10.3f}"
        for variant in comparison.rounds
    )
    ratio, ratios = comparison.ratio(*VARIANTS), comparison.ratios(*VARIANTS)
    rounds = f"({min(ratios):.3f} to {max(ratios):.3f})"
    return f"{comparison.workers:7}  {comparison.case:22}{columns}{ratio:9.3f}  {rounds}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.all_gather", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each way (6)")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a turn takes (0.5)")
    arguments = parser.parse_args(argv)
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f}; milliseconds of a collective")
    print(f"workers  {'case':22}{'group median':>14}{'p99':>10}{'messages':>14}{'p99':>10}{'ratio':>9}")
    for workers in arguments.workers:
        with contextlib.ExitStack() as stack:
            sets = [stack.enter_context(WorkerSet(variant, workers, start)) for variant in VARIANTS]
            for case in SIZES:
                print(row(compare(case, sets, arguments.rounds, arguments.seconds)), flush=True)


if __name__ == "__main__":
    preload()
    main()
