"""Compares calls that carry CUDA tensors with TensorPipe's, between two workers of this host that share a GPU.

python -m benchmarks.cuda                         # a table on stdout: a minute; needs a GPU
python -m benchmarks.cuda --save docs/benchmarks  # also writes the table to cuda.txt in that folder

A tensor on cuda:0 is sent to the peer and comes back; the time ends when the GPU has done all of it.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from .calls import KIB, MIB, PEER, echo
from .harness import Case, Comparison, compare, seconds_of
from .machine import machine_facts
from .systems import System, gradwire_system, torch_system
from .text_report import arguments_of, make_parser, publish
from .worker_sets import preload

SAVED = "cuda.txt"
"""The file that `--save` writes."""

GPU = "cuda:0"

SYSTEMS = {
    system.name: system
    for system in (
        gradwire_system("gradwire", device_maps={PEER: {0: 0}}),
        torch_system("torch", device_maps={PEER: {0: 0}}),
    )
}

SIZES = {
    "echo 4 KiB": 4 * KIB,
    "echo 256 KiB": 256 * KIB,
    "echo 1 MiB": MIB,
    "echo 16 MiB": 16 * MIB,
    "echo 256 MiB": 256 * MIB,
}

HEADER = f"{'':14}{'gradwire':>10}{'torch':>10}  | ratio: {'median':>7}  {'(rounds)':14}{'p99':>7}{'cpu':>7}"


class Echo(Case):
    """Sends a tensor on a GPU to the peer, and gets it back there."""

    nbytes: ClassVar[int]

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._tensor = torch.arange(self.nbytes // 4, dtype=torch.float32, device=GPU)

    def step(self) -> float:
        """Sends it once, and waits for the GPU."""
        return seconds_of(self._send)

    def results(self) -> list[torch.Tensor]:
        """Returns a part of what comes back."""
        return [self._send()[-1000:].cpu()]

    def _send(self) -> torch.Tensor:
        echoed: torch.Tensor = self._rpc.rpc_sync(PEER, echo, args=(self._tensor,))
        assert echoed.is_cuda
        torch.cuda.synchronize()
        return echoed


def _case(name: str, nbytes: int) -> type[Case]:
    """Makes the case of one size, at the top level of this module so that workers find it."""
    case = type(f"Echo{nbytes}", (Echo,), {"__module__": __name__, "name": name, "nbytes": nbytes})
    globals()[case.__name__] = case
    return case


CASES = [_case(name, nbytes) for name, nbytes in SIZES.items()]


def start(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group of one of the systems."""
    SYSTEMS[name].start(rank, size, url)
    return SYSTEMS[name].stop


def row(comparison: Comparison) -> str:
    """Returns the line of a case, with times in milliseconds."""
    times = "".join(f"{comparison.median(name) * 1e3:10.3f}" for name in SYSTEMS)
    ours, theirs = SYSTEMS
    ratios = comparison.ratios(ours, theirs)
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    p99 = comparison.p99(ours) / comparison.p99(theirs)
    cpu = comparison.cpu_of(ours) / comparison.cpu_of(theirs)
    ratio = comparison.ratio(ours, theirs)
    return f"{comparison.case:14}{times}  |        {ratio:7.2f}  {spread:14}{p99:7.2f}{cpu:7.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    arguments = arguments_of(make_parser("cuda", __doc__, SAVED, rounds=6, seconds=0.3), argv)
    if not torch.cuda.is_available():
        raise SystemExit("torch.cuda.is_available() is False: this benchmark needs a GPU")
    facts = {**machine_facts(), "GPU": torch.cuda.get_device_name()}
    comparisons = list(
        compare(CASES, list(SYSTEMS.values()), rounds=arguments.rounds, seconds=arguments.seconds, start=start)
    )
    text = (
        f"Milliseconds of an echo, in {arguments.rounds} rounds of {arguments.seconds:g} s of each system; ratios "
        "of the medians, of the 99th percentiles and of the processor time of both workers; in brackets, the "
        "lowest and the highest ratio of the medians of a round."
    )
    measured = [
        {"case": each.case, "system": name, "median": each.median(name), "p99": each.p99(name)}
        for each in comparisons
        for name in SYSTEMS
    ]
    publish(arguments, SAVED, facts, text, [HEADER, *map(row, comparisons)], measured)


if __name__ == "__main__":
    preload()
    main()
