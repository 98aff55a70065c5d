"""Compares `rpc.broadcast_call` with as many calls of `rpc.rpc_async`, in one run.

python -m benchmarks.broadcast_call                              # a table on stdout
python -m benchmarks.broadcast_call --mib 0.25 1 --receivers 2   # these sizes, to two workers
python -m benchmarks.broadcast_call --transports tcp grpc        # as between hosts

Workers on this host get one float32 tensor and answer with one of its elements. Both variants run in turns in the
same processes; times are from the calls to the last answer. The time of the first broadcast is printed apart: it
connects the workers, and forms their process group unless they share memory.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from gradwire import rpc

from .calls import MIB
from .command_line import Report, arguments_of, make_parser
from .worker_sets import WorkerSet, preload

WARM_UP = 3

Way = Callable[[list[str], torch.Tensor], list[rpc.Future]]


def first_element(tensor: torch.Tensor) -> float:
    """Returns the first element of a tensor: the function that the workers run."""
    return float(tensor.view(-1)[0])


def broadcast(names: list[str], tensor: torch.Tensor) -> list[rpc.Future]:
    """Makes one call to all workers."""
    return rpc.broadcast_call(names, first_element, (tensor,))


def call_each(names: list[str], tensor: torch.Tensor) -> list[rpc.Future]:
    """Makes a call to each worker."""
    return [rpc.rpc_async(name, first_element, (tensor,)) for name in names]


def seconds_of(way: Way, names: list[str], tensor: torch.Tensor) -> float:
    """Returns the seconds until all workers have answered."""
    start = time.perf_counter()
    answers = [future.wait() for future in way(names, tensor)]
    taken = time.perf_counter() - start
    assert answers == [float(tensor[0])] * len(names)
    return taken


def start(transports: Sequence[str], _: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group."""
    broadcasts = rpc.BroadcastOptions(threshold=64 * 1024)
    options = rpc.RpcBackendOptions(init_method=url, transports=transports, broadcasts=broadcasts)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    return rpc.shutdown


def first_seconds(receivers: int) -> float:
    """Returns the seconds of a first broadcast of 1 MiB."""
    return seconds_of(broadcast, names_of(receivers), torch.rand(MIB // 4))


def medians(receivers: int, mib: float, rounds: int) -> tuple[float, float]:
    """Returns the median seconds of a broadcast and of a call to each worker."""
    names, tensor = names_of(receivers), torch.rand(int(mib * MIB / 4))
    times: dict[Way, list[float]] = {broadcast: [], call_each: []}
    for _ in range(WARM_UP + rounds):
        for way, taken in times.items():
            taken.append(seconds_of(way, names, tensor))
    return statistics.median(times[broadcast][WARM_UP:]), statistics.median(times[call_each][WARM_UP:])


def names_of(receivers: int) -> list[str]:
    """Returns the names of the workers that are called."""
    return [f"worker{number}" for number in range(1, receivers + 1)]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.broadcast_call", __doc__)
    parser.add_argument("--receivers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", nargs="+", default=["unix", "tcp", "grpc"])
    arguments = arguments_of(parser, argv)
    text = f"Milliseconds until all receivers have answered: medians of {arguments.rounds} calls."
    report = Report(text, f"{'':14}{'broadcast_call':>17}{'rpc_async':>17}{'ratio':>9}")
    for receivers in arguments.receivers:
        joining = partial(start, arguments.transports)
        with WorkerSet("gradwire", receivers + 1, joining) as workers, workers.running():
            first = workers.ask(first_seconds, receivers) * 1e3
            report.print(f"{receivers} receivers; the first broadcast, of 1 MiB: {first:.1f} ms")
            for mib in arguments.mib:
                ours, theirs = workers.ask(medians, receivers, mib, arguments.rounds)
                report.print(f"{mib:10g} MiB{ours * 1e3:14.3f} ms{theirs * 1e3:14.3f} ms{ours / theirs:9.2f}")
                figures = {"receivers": receivers, "mib": mib, "broadcast_call": ours, "rpc_async": theirs}
                report.measured.append(figures)
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
