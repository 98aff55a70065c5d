"""Train a network that is split over three workers, with several micro-batches in flight.

Three processes, each with a third of a convolutional network. The first one also runs the training: it splits
every batch of handwritten digits into micro-batches and sends them through the stages. While one stage works on a
micro-batch, the others work on the next and the previous ones. The backward pass does the same in the opposite
direction. The gradients of all micro-batches are accumulated; then a DistributedOptimizer updates all stages
(GPipe, Huang et al., 2019).

    python examples/pipeline.py                                     # starts the processes itself
    python examples/pipeline.py --compare --timing 3 --plot curve.png
    torchrun --nproc-per-node 3 examples/pipeline.py                # one process per stage

The data are the 1,797 digits of 8 x 8 pixels that ship with scikit-learn (Alpaydin and Kaynak, 1998).
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from gradwire import autograd, launch, rpc
from gradwire.errors import WorkerLostError
from gradwire.optim import DistributedOptimizer
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional as F
from tqdm import tqdm

STAGES = ["stage0", "stage1", "stage2"]
TIMED_IN_FLIGHT = [1, 2, 4, 8]
"""The numbers of micro-batches in flight that --timing compares."""

MicroBatch = tuple[Tensor, Tensor]


def layers(stage: int, width: int, seed: int) -> nn.Sequential:
    """Makes the layers of one stage; each stage has about a third of the work."""
    torch.manual_seed(seed + stage)
    if stage == 0:
        parts = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    elif stage == 1:
        parts = [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    else:
        last = 3 * width
        parts = [nn.Conv2d(width, last, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(last * 4 * 4, 10)]
    return nn.Sequential(*parts)


class Stage:
    """A third of the network, on its worker. Processes micro-batches in order, one at a time."""

    def __init__(self, stage: int, width: int, seed: int) -> None:
        self.layers = layers(stage, width, seed)
        self.next_number = 0
        self.turn = threading.Condition()

    def forward(self, number: int, rref: rpc.RRef[Tensor]) -> Tensor:
        """Fetches the output of the previous stage for micro-batch `number`, and computes this stage's output."""
        with self.turn:  # calls run on several threads, in any order
            self.turn.wait_for(lambda: number == self.next_number)
            try:
                output: Tensor = self.layers(rref.to_here())
                return output
            finally:
                self.next_number += 1
                self.turn.notify_all()

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Returns references to the parameters, for the optimizer of the first worker."""
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


class Pipeline:
    """The network on its three workers."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.stages = [
            rpc.remote(name, Stage, (index, args.width, args.seed)) for index, name in enumerate(STAGES)
        ]
        self.number = 0
        parameters = [stage.rpc_async().parameter_rrefs() for stage in self.stages]
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam, [rref for pending in parameters for rref in pending.wait()], lr=args.lr
        )

    def start(self, images: Tensor) -> rpc.RRef[Tensor]:
        """Starts a micro-batch through all stages without waiting; returns a reference to its logits (n, 10)."""
        rref = rpc.RRef(images)
        for stage in self.stages:
            rref = stage.remote().forward(self.number, rref)
        self.number += 1
        return rref

    def train(self, batch: Sequence[MicroBatch], in_flight: int) -> float:
        """Trains on a batch with `in_flight` micro-batches at a time; returns the mean loss."""
        total, size = 0.0, sum(len(labels) for _, labels in batch)
        with autograd.context() as context_id:
            for first in range(0, len(batch), in_flight):
                window = batch[first : first + in_flight]
                outputs = [self.start(images) for images, _ in window]  # all in flight at once
                losses = [
                    F.cross_entropy(output.to_here(), labels, reduction="sum") / size
                    for output, (_, labels) in zip(outputs, window, strict=True)
                ]
                autograd.backward(context_id, losses)  # accumulates in the context
                total += sum(loss.item() for loss in losses)
            self.optimizer.step(context_id)
        return total

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Returns the logits (n, 10) of images (n, 1, 8, 8)."""
        return self.start(images).to_here()


class OneProcess:
    """The same network, batches and optimizer in this process, for comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.network = nn.Sequential(*(layers(index, args.width, args.seed) for index in range(len(STAGES))))
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=args.lr)

    def train(self, batch: Sequence[MicroBatch], in_flight: int) -> float:
        """As `Pipeline.train`."""
        total, size = 0.0, sum(len(labels) for _, labels in batch)
        self.optimizer.zero_grad()
        for first in range(0, len(batch), in_flight):
            losses = [
                F.cross_entropy(self.network(images), labels, reduction="sum") / size
                for images, labels in batch[first : first + in_flight]
            ]
            torch.autograd.backward(losses)
            total += sum(loss.item() for loss in losses)
        self.optimizer.step()
        return total

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """As `Pipeline.logits`."""
        return self.network(images)  # type: ignore[no-any-return]


def digits(seed: int) -> tuple[MicroBatch, MicroBatch]:
    """Loads images (n, 1, 8, 8), float32 in [0, 1], and labels (n,), int64; a fifth is for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(labels) // 5], order[len(labels) // 5 :]
    return (images[train], labels[train]), (images[test], labels[test])


class Training:
    """Trains a network; gives both kinds of networks the same batches in the same order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        (self.images, self.labels), self.test = digits(args.seed)

    def batches(self, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yields the training data, shuffled by epoch, as batches of micro-batches."""
        generator = torch.Generator().manual_seed(self.args.seed + epoch)
        order = torch.randperm(len(self.labels), generator=generator)
        for first in range(0, len(order), self.args.batch_size):
            micro_batches = order[first : first + self.args.batch_size].tensor_split(self.args.micro_batches)
            yield [(self.images[micro], self.labels[micro]) for micro in micro_batches if len(micro)]

    def run(self, network: Pipeline | OneProcess, title: str) -> list[float]:
        """Trains a network for all epochs; returns the losses of all batches."""
        losses: list[float] = []
        for epoch in range(self.args.epochs):
            steps = -(-len(self.labels) // self.args.batch_size)
            bar = tqdm(
                self.batches(epoch), f"{title}, epoch {epoch + 1:2}", steps, leave=False, disable=self.args.quiet
            )
            losses += [network.train(batch, self.args.in_flight) for batch in bar]
            images, labels = self.test
            accuracy = (network.logits(images).argmax(1) == labels).double().mean().item()
            print(
                f"{title}, epoch {epoch + 1:2}   loss {losses[-1]:.4f}   test accuracy {accuracy:.1%}", flush=True
            )
        return losses

    def time(self, network: Pipeline | OneProcess, in_flight: int) -> float:
        """Returns the duration of an epoch in seconds."""
        started = time.perf_counter()
        for batch in self.batches(0):
            network.train(batch, in_flight)
        return time.perf_counter() - started


def direct(args: argparse.Namespace) -> None:
    """Runs on the first worker: trains, compares and reports."""
    training, pipeline, alone = Training(args), Pipeline(args), OneProcess(args)
    curves = {"three workers": training.run(pipeline, "three workers")}
    if args.compare:
        curves["one process"] = training.run(alone, "one process")
        pairs = zip(*curves.values(), strict=True)
        print(f"\nlargest difference between the losses: {max(abs(a - b) for a, b in pairs):g}")
    seconds: dict[str, float] = {}
    if args.timing:
        rounds = [
            [training.time(alone, 1), *(training.time(pipeline, in_flight) for in_flight in TIMED_IN_FLIGHT)]
            for _ in tqdm(range(args.timing), "timing", leave=False, disable=args.quiet)
        ]
        medians = [median(times) for times in zip(*rounds, strict=True)]
        seconds = dict(zip(["one process", *map(str, TIMED_IN_FLIGHT)], medians, strict=True))
        print(f"\n{'in flight':12} {'s per epoch':>11}")
        for name, value in seconds.items():
            print(f"{name:12} {value:11.2f}")
    if args.plot:
        plot(args.plot, curves, seconds)
        print(f"plotted in {args.plot}")


def plot(path: Path, curves: dict[str, list[float]], seconds: dict[str, float]) -> None:
    """Plots the losses, and the durations of an epoch if there are any, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2 if seconds else 1, figsize=(9, 3.5), layout="constrained", squeeze=False)
    for (name, losses), style in zip(curves.items(), ["-", "--"], strict=False):
        axes[0, 0].plot(range(1, len(losses) + 1), losses, style, label=name)
    axes[0, 0].set(xlabel="step", ylabel="training loss", yscale="log")
    axes[0, 0].legend()
    if seconds:
        colors = ["tab:orange"] + ["tab:blue"] * len(TIMED_IN_FLIGHT)
        axes[0, 1].bar(seconds.keys(), seconds.values(), color=colors)
        axes[0, 1].set(xlabel="micro-batches in flight", ylabel="seconds per epoch")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs one process of the group."""
    rpc.init_rpc(STAGES[rank])  # reads rank, world size and address from the environment
    try:
        if rank == 0:
            direct(args)
        rpc.shutdown()
    except WorkerLostError as lost:
        rpc.shutdown(graceful=False)
        sys.exit(f"{STAGES[rank]}: {lost}")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="passes over the training data (default 6)")
    parser.add_argument("--width", type=int, default=64, help="channels of the convolutions (default 64)")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step (default 128)")
    parser.add_argument("--micro-batches", type=int, default=8, help="parts of a batch (default 8)")
    parser.add_argument("--in-flight", type=int, default=4, help="micro-batches in flight (default 4)")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of Adam (default 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--compare", action="store_true", help="also train the same network in one process")
    parser.add_argument(
        "--timing", type=int, default=0, metavar="ROUNDS", help="time epochs with 1, 2, 4 and 8 in flight"
    )
    parser.add_argument("--plot", type=Path, help="plot losses and timings into this PNG file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if min(args.epochs, args.width, args.batch_size, args.micro_batches, args.in_flight) < 1:
        parser.error("--epochs, --width, --batch-size, --micro-batches and --in-flight must be at least 1")
    return args


def main() -> None:
    """Runs one stage under a launcher; otherwise starts a process for each stage."""
    args = parse_arguments()
    launched = launch.this_process()
    if launched is None:
        try:
            launch.spawn(work, len(STAGES), (args,))
        except ProcessExitedException as failed:
            sys.exit(str(failed))
        return
    if launched.world_size != len(STAGES):
        sys.exit("the launcher must start 3 processes, one for each stage")
    work(launched.rank, args)


if __name__ == "__main__":
    main()
