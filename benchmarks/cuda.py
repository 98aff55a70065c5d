"""Compares calls that carry CUDA tensors with TensorPipe's, between two workers of this host that share a GPU.

python -m benchmarks.cuda                         # a table on stdout: a minute; needs a GPU
python -m benchmarks.cuda --save docs/benchmarks  # also writes the table to cuda.txt in that folder

A tensor on cuda:0 is sent to the peer and comes back; the time ends when the GPU has done all of it.
"""

from collections.abc import Callable, Sequence

import torch

from . import calls
from .calls import KIB, MIB, PEER
from .command_line import Report, add_rounds, arguments_of, make_parser
from .harness import RATIO_HEADER, Comparison, compare
from .systems import gradwire_system, torch_system
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

HEADER = f"{'':14}{'gradwire':>10}{'torch':>10}{RATIO_HEADER}"


class Echo(calls.Echo):
    """Sends a tensor on a GPU to the peer, and gets it back there."""

    device = GPU

    def send(self) -> torch.Tensor:
        """Sends it once, and waits for the GPU."""
        echoed = super().send()
        assert echoed.is_cuda
        torch.cuda.synchronize()
        return echoed


CASES = [
    Echo.variant(f"echo {size}", nbytes=nbytes)
    for size, nbytes in (
        ("4 KiB", 4 * KIB),
        ("256 KiB", 256 * KIB),
        ("1 MiB", MIB),
        ("16 MiB", 16 * MIB),
        ("256 MiB", 256 * MIB),
    )
]


def start(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group of one of the systems."""
    SYSTEMS[name].start(rank, size, url)
    return SYSTEMS[name].rpc.shutdown  # type: ignore[no-any-return]


def row(comparison: Comparison) -> str:
    """Returns the line of a case, with times in milliseconds."""
    times = "".join(f"{comparison.median(name) * 1e3:10.3f}" for name in SYSTEMS)
    return f"{comparison.case:14}{times}{comparison.ratio_columns(*SYSTEMS)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.cuda", __doc__, SAVED)
    add_rounds(parser, rounds=6, seconds=0.3)
    arguments = arguments_of(parser, argv)
    if not torch.cuda.is_available():
        raise SystemExit("torch.cuda.is_available() is False: this benchmark needs a GPU")
    text = (
        f"Milliseconds of an echo, in {arguments.rounds} rounds of {arguments.seconds:g} s of each system; ratios "
        "of the medians (the median of those of single rounds; in brackets, the lowest and the highest), of the "
        "99th percentiles and of the processor time of both workers."
    )
    report = Report(text, HEADER, GPU=torch.cuda.get_device_name())
    systems = list(SYSTEMS.values())
    for each in compare(CASES, systems, rounds=arguments.rounds, seconds=arguments.seconds, start=start):
        report.print(row(each))
        report.measured += [{"case": each.case, **each.figures(name)} for name in SYSTEMS]
    report.close(arguments, SAVED)


if __name__ == "__main__":
    preload()
    main()
