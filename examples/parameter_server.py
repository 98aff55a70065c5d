"""Train a network on a parameter server.

Four processes: a coordinator that runs the training and reports, a server with a small convolutional network, and
two trainers. A trainer sends a batch of handwritten digits to the server, gets the logits back, and computes the
loss. The backward pass follows the same calls in the opposite direction, and a DistributedOptimizer updates the
parameters on the server. The two trainers work asynchronously.

    python examples/parameter_server.py                          # starts all processes itself
    torchrun --nproc-per-node 4 examples/parameter_server.py     # one process per role
    python examples/parameter_server.py --ray                    # starts them on the nodes of a Ray cluster

On several hosts, start each process with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or by torchrun, srun,
mpiexec or Kubernetes (docs/launch.md), with a token that all of them share; or with --insecure, which trusts the
network between them:

    export GRADWIRE_TOKEN_FILE=token    # made once by `gradwire certs token > token`
    RANK=1 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python examples/parameter_server.py

The data are the 1,797 digits of 8 x 8 pixels that ship with scikit-learn (Alpaydin and Kaynak, 1998).
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from gradwire import autograd, launch, rpc
from gradwire.errors import WorkerLostError
from gradwire.optim import DistributedOptimizer
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional as F
from tqdm import tqdm

COORDINATOR, SERVER = "coordinator", "server"


@dataclass(frozen=True)
class Digits:
    """The data set, shuffled and split."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, seed: int) -> Self:
        """Loads images (n, 1, 8, 8), float32 in [0, 1], and labels (n,), int64; a fifth is for testing."""
        from sklearn.datasets import load_digits  # a second of processor time, which only the coordinator needs

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        test, train = order.split([len(labels) // 5, len(labels) - len(labels) // 5])
        return cls((images[train], labels[train]), (images[test], labels[test]))


class Network(nn.Module):
    """The model, which is on the server."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits (n, 10) of images (n, 1, 8, 8)."""
        logits: Tensor = self.layers(images)
        return logits

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Returns references to the parameters, for the optimizers of the trainers."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    @torch.no_grad()
    def evaluate(self, images: Tensor, labels: Tensor) -> float:
        """Returns the fraction of images that are classified correctly."""
        return (self(images).argmax(1) == labels).double().mean().item()


@dataclass
class Progress:
    """Collects the losses that the trainers report; it is on the coordinator."""

    losses: list[float] = field(default_factory=list)
    bar: Any = None

    def advance(self, loss: float) -> None:
        """Records the loss of a batch."""
        self.losses.append(loss)
        self.bar.update()


class Trainer:
    """Trains the model on a share of the data: images (n, 1, 8, 8) and labels (n,)."""

    def __init__(
        self,
        index: int,
        share: tuple[Tensor, Tensor],
        model: rpc.RRef[Network],
        progress: rpc.RRef[Progress],
        args: argparse.Namespace,
    ):
        self.images, self.labels = share
        self.model, self.progress, self.batch_size = model, progress, args.batch_size
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD, model.rpc_sync().parameter_rrefs(), lr=args.lr, momentum=args.momentum
        )
        self.generator = torch.Generator().manual_seed(args.seed + index)

    def batches(self) -> int:
        """Returns the number of batches in an epoch."""
        return -(-len(self.labels) // self.batch_size)

    def train_epoch(self) -> None:
        """Trains once on every batch of the share, in random order."""
        order = torch.randperm(len(self.labels), generator=self.generator)
        for batch in order.split(self.batch_size):
            with autograd.context() as context_id:
                logits = self.model.rpc_sync().forward(self.images[batch])  # runs on the server
                loss = F.cross_entropy(logits, self.labels[batch])
                autograd.backward(context_id, [loss])
                self.optimizer.step(context_id)
            self.progress.rpc_sync().advance(loss.item())


def coordinate(args: argparse.Namespace) -> None:
    """Runs the coordinator: creates the model and the trainers, runs the epochs, and reports."""
    digits = Digits.load(args.seed)
    images, labels = digits.train
    shares = [(images[index :: args.trainers], labels[index :: args.trainers]) for index in range(args.trainers)]
    progress = rpc.RRef(Progress())
    model = rpc.remote(SERVER, Network, (args.seed,))
    trainers = [
        rpc.remote(f"trainer{index}", Trainer, (index, share, model, progress, args))
        for index, share in enumerate(shares)
    ]
    workers = [COORDINATOR, SERVER, *(trainer.owner_name() for trainer in trainers)]
    print("processes: " + ", ".join(f"{name} {rpc.rpc_sync(name, os.getpid)}" for name in workers), flush=True)
    batches = sum(trainer.rpc_sync().batches() for trainer in trainers)
    losses, accuracies = [], [model.rpc_sync().evaluate(*digits.test)]
    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        with tqdm(total=batches, desc=f"epoch {epoch:2}/{args.epochs}", leave=False, disable=args.quiet) as bar:
            progress.local_value().bar = bar
            for pending in [trainer.rpc_async(timeout=0).train_epoch() for trainer in trainers]:
                pending.wait()
        losses.append(sum(progress.local_value().losses[-batches:]) / batches)
        accuracies.append(model.rpc_sync().evaluate(*digits.test))
        print(f"epoch {epoch:2}   loss {losses[-1]:.4f}   test accuracy {accuracies[-1]:.1%}", flush=True)
    print(f"\n{args.epochs} epochs in {time.perf_counter() - started:.1f} s")
    report_traffic(workers)
    if args.plot:
        plot(args.plot, losses, accuracies)
        print(f"loss and accuracy are plotted in {args.plot}")


def report_traffic(workers: list[str]) -> None:
    """Prints how many messages and bytes each worker has sent and received."""
    print(f"\n{'worker':12} {'messages sent':>14} {'received':>10} {'MiB sent':>10} {'received':>10}")
    for name in workers:
        info = rpc.rpc_sync(name, rpc.debug_info)
        sent, received = info["bytes_sent"] / 2**20, info["bytes_received"] / 2**20
        print(
            f"{name:12} {info['messages_sent']:14,} {info['messages_received']:10,} {sent:10.2f} {received:10.2f}"
        )


def plot(path: Path, losses: list[float], accuracies: list[float]) -> None:
    """Plots loss and accuracy over epochs into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, marker="o")
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    right.plot(range(len(accuracies)), [100 * a for a in accuracies], marker="o", color="tab:green")
    right.set(xlabel="epoch", ylabel="test accuracy, %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def role(rank: int) -> str:
    """Returns the name of the process with this rank."""
    return [COORDINATOR, SERVER][rank] if rank < 2 else f"trainer{rank - 2}"


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs one process of the group."""
    name = role(rank)
    # Rank, world size and rendezvous address are in the environment.
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(insecure=args.insecure))
    try:
        if name == COORDINATOR:
            coordinate(args)
        rpc.shutdown()
    except WorkerLostError as lost:
        rpc.shutdown(graceful=False)
        sys.exit(f"{name}: {lost}")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data (default 12)")
    parser.add_argument(
        "--trainers", type=int, default=2, help="trainers to start (default 2); ignored under a launcher"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images per step of a trainer (default 32)")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of SGD (default 0.03)")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD (default 0.9)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--plot", type=Path, help="plot loss and accuracy into this PNG file")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow several hosts without a token; everybody who can connect can run code",
    )
    parser.add_argument("--ray", action="store_true", help="start the processes on a Ray cluster")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.trainers < 1 or args.epochs < 1 or args.batch_size < 1:
        parser.error("--trainers, --epochs and --batch-size must be at least 1")
    return args


def main() -> None:
    """Runs one role under a launcher; otherwise starts a process for each role."""
    args = parse_arguments()
    launched = launch.this_process()
    if launched is None:
        start = launch.ray if args.ray else launch.spawn
        try:
            start(work, 2 + args.trainers, (args,))
        except ProcessExitedException as failed:
            sys.exit(str(failed))
        return
    args.trainers = launched.world_size - 2
    if args.trainers < 1:
        sys.exit("the launcher must start at least 3 processes: a coordinator, a server and a trainer")
    work(launched.rank, args)


if __name__ == "__main__":
    main()
