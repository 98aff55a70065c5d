"""Compares `rpc.barrier` and `rpc.all_gather` by messages with the same through a process group, in one run.

python -m benchmarks.gatherings                          # a table on stdout
python -m benchmarks.gatherings --workers 8 --seconds 1  # of eight workers, turns of a second

Each way has workers of its own on this host, which take turns. Times are those that worker 0 sees.
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
from .team import WARM_UP, Team, turns

GROUP, MESSAGES = WAYS = "group", "messages"

MOST_ROUNDS = 3000

SIZES = {"barrier": 0, "all_gather of 100 B": 100, "all_gather of 1 MiB": 2**20}
"""Bytes of each worker's value, by case."""


def start(way: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the others, and with them forms the group if it is wanted."""
    torch.set_num_threads(1)
    all_gather = rpc.AllGatherOptions(enabled=way == GROUP, after=1)
    options = rpc.RpcBackendOptions(init_method=url, all_gather=all_gather)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    while way == GROUP and sum(rpc.all_gather(rpc.debug_info()["all_gather_groups"]).values()) < size:
        time.sleep(0.01)  # it forms in the background
    return rpc.shutdown


def measure(case: str, rounds: int) -> list[float]:
    """The seconds of each round."""
    value = np.random.default_rng().bytes(SIZES[case])
    taken = []
    for _ in range(WARM_UP + rounds):
        begun = time.perf_counter()
        gathered = rpc.barrier() if case == "barrier" else rpc.all_gather(value)
        taken.append(time.perf_counter() - begun)
        assert gathered is None or gathered[rpc.get_worker_info().name] == value
    return taken[WARM_UP:]


def compare(case: str, teams: Sequence[Team], rounds: int, seconds: float) -> Comparison:
    """Measures a case both ways."""
    steps = {}
    for team in turns(teams, 1):
        one = statistics.median(team.ask_all(measure, case, 5)[0])
        steps[team.name] = max(5, min(MOST_ROUNDS, int(seconds / one)))
    measured: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for team in turns(teams, rounds):
        measured[team.name].append(team.ask_all(measure, case, steps[team.name])[0])
    return Comparison(case, teams[0].size, measured, results={})


def row(comparison: Comparison) -> str:
    """A line of the table."""
    columns = "".join(
        f"{comparison.median(way) * 1e3:14.3f}{comparison.p99(way) * 1e3:10.3f}" for way in comparison.rounds
    )
    low, high = min(comparison.ratios), max(comparison.ratios)
    return (
        f"{comparison.workers:7}  {comparison.case:22}{columns}{comparison.ratio:9.3f}  ({low:.3f} to {high:.3f})"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.gatherings", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each way (6)")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a turn takes (0.5)")
    arguments = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.2f}; milliseconds of a gathering")
    print(f"workers  {'case':22}{'group median':>14}{'p99':>10}{'messages':>14}{'p99':>10}{'ratio':>9}")
    for workers in arguments.workers:
        with contextlib.ExitStack() as stack:
            teams = [stack.enter_context(Team(way, workers, start)) for way in WAYS]
            for case in SIZES:
                print(row(compare(case, teams, arguments.rounds, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
