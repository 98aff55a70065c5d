"""Train a language model that is partly replicated and partly on a server.

Four processes: a coordinator that runs the training and reports, a server with a table of word embeddings, and two
trainers. The dense layers are replicated on the trainers by torch's DistributedDataParallel, which averages their
gradients. The table exists once, as a RemoteModule, and gets sparse gradients for the rows that a batch used. A
DistributedOptimizer on each trainer updates both.

    python examples/hybrid.py --compare --plot out/hybrid.png       # starts all processes itself
    torchrun --nproc-per-node 4 examples/hybrid.py                  # one process per role

The model predicts a word from the three words before it (Bengio et al., 2003). The text is the part of Python's
language reference that `help()` shows, 114,000 words in Python 3.11. `--compare` also trains the same model in one
process; in float64, the losses are equal up to rounding.
"""

import argparse
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Self

import torch
from gradwire import autograd, launch, rpc
from gradwire.errors import WorkerLostError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

COORDINATOR, SERVER = "coordinator", "server"
CONTEXT_LENGTH = 3
"""Number of words from which the model predicts the next one."""


@dataclass(frozen=True)
class Corpus:
    """Samples of a text: the indices of the preceding words (n, 3) and of the word (n,), both int64."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls, vocabulary: int) -> Self:
        """Loads the text, in the same way on every worker. Index 0 stands for all infrequent words."""
        text = re.findall(r"[a-z_]+|\d+|[^\w\s]", "\n".join(topics.values()).lower())
        frequent = Counter(text).most_common(vocabulary - 1)
        numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}
        samples = torch.tensor([numbers.get(word, 0) for word in text]).unfold(0, CONTEXT_LENGTH + 1, 1)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
        test, train = samples[order].tensor_split([len(samples) // 10])
        n = CONTEXT_LENGTH
        return cls((train[:, :n], train[:, n]), (test[:, :n], test[:, n]))

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the training samples in batches of `size`, shuffled by `seed`; drops an incomplete last batch."""
        contexts, targets = self.train
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
        for batch in order.unfold(0, size, size):
            yield contexts[batch], targets[batch]


def make_table(args: argparse.Namespace) -> nn.Module:
    """Makes the embedding table, one row per word; runs on the server."""
    torch.manual_seed(args.seed)
    return nn.Embedding(args.vocabulary, args.width, sparse=True, dtype=torch.double)


def make_dense(args: argparse.Namespace) -> nn.Module:
    """Makes the dense layers, from rows (n, 3, width) to logits (n, vocabulary); every trainer has a replica."""
    torch.manual_seed(args.seed + 1)
    layers = nn.Sequential(
        nn.Flatten(),
        nn.Linear(CONTEXT_LENGTH * args.width, args.hidden),
        nn.Tanh(),
        nn.Linear(args.hidden, args.vocabulary),
    )
    return layers.double()


class Trainer:
    """Trains on its share of every batch."""

    def __init__(self, index: int, table: RemoteModule, args: argparse.Namespace) -> None:
        self.index, self.table, self.args = index, table, args
        self.corpus = Corpus.load(args.vocabulary)
        distributed.init_process_group("gloo", rank=index, world_size=args.trainers)  # trainers only
        self.dense = DistributedDataParallel(make_dense(args))
        self.optimizer = DistributedOptimizer(
            torch.optim.SGD,
            [
                # Every trainer applies its own gradients to the table, while those of the replicas are averaged.
                {"params": table.remote_parameters(), "lr": args.lr / args.trainers},
                {"params": [rpc.RRef(parameter) for parameter in self.dense.parameters()]},
            ],
            lr=args.lr,
        )

    def train_epoch(self, epoch: int) -> Iterator[float]:
        """Trains for one epoch; yields the loss of this trainer's share of each batch."""
        for contexts, targets in self.corpus.batches(self.args.batch_size, self.args.seed + epoch):
            share = slice(self.index, None, self.args.trainers)
            with autograd.context() as context_id:
                rows = self.table(contexts[share])  # looked up on the server
                loss = F.cross_entropy(self.dense(rows), targets[share])
                autograd.backward(context_id, [loss])  # DDP waits here for all trainers
                self.optimizer.step(context_id)
            distributed.barrier()  # all trainers have updated the table before the next lookup
            yield loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the perplexity on the test samples, the exponential of the mean cross entropy."""
        contexts, targets = self.corpus.test
        return math.exp(F.cross_entropy(self.dense.module(self.table(contexts)), targets).item())


def train_epoch(trainer: rpc.RRef[Trainer], epoch: int) -> Iterator[float]:
    """Runs an epoch on a trainer, which streams the losses to the coordinator."""
    return trainer.local_value().train_epoch(epoch)


def train_in_one_process(corpus: Corpus, args: argparse.Namespace) -> Iterator[float]:
    """Trains the same model on the same batches in this process alone; yields the losses."""
    table, dense = make_table(args), make_dense(args)
    optimizer = torch.optim.SGD([*table.parameters(), *dense.parameters()], lr=args.lr)
    for epoch in range(args.epochs):
        for contexts, targets in corpus.batches(args.batch_size, args.seed + epoch):
            loss = F.cross_entropy(dense(table(contexts)), targets)
            optimizer.zero_grad()
            torch.autograd.backward([loss])
            optimizer.step()
            yield loss.item()


def coordinate(args: argparse.Namespace) -> None:
    """Runs the coordinator: creates the table and the trainers, runs the epochs, and reports."""
    corpus = Corpus.load(args.vocabulary)
    table = RemoteModule(SERVER, make_table, (args,))
    trainers = [
        rpc.remote(f"trainer{index}", Trainer, (index, table, args), timeout=0) for index in range(args.trainers)
    ]
    losses: list[float] = []
    started = time.perf_counter()
    for epoch in range(args.epochs):
        streams = [rpc.rpc_stream(each.owner(), train_epoch, (each, epoch), timeout=0) for each in trainers]
        steps = tqdm(
            zip(*streams, strict=True),
            total=len(corpus.train[1]) // args.batch_size,
            desc=f"epoch {epoch + 1}/{args.epochs}",
            leave=False,
            disable=args.quiet,
        )
        losses.extend(sum(shares) / args.trainers for shares in steps)
        perplexity = trainers[0].rpc_sync(timeout=0).evaluate()
        print(f"epoch {epoch + 1}   loss {losses[-1]:.4f}   test perplexity {perplexity:.1f}", flush=True)
    print(f"{len(losses)} steps in {time.perf_counter() - started:.1f} s")
    alone: list[float] = []
    if args.compare:
        alone.extend(tqdm(train_in_one_process(corpus, args), "one process", len(losses), disable=args.quiet))
        largest = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        print(f"largest difference of a loss from that in one process: {largest:.1e}", flush=True)
    if args.plot:
        plot(args.plot, losses, alone)
        print(f"losses are plotted in {args.plot}", flush=True)


def plot(path: Path, losses: list[float], alone: list[float]) -> None:
    """Plots the losses, and their difference from those of one process, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2 if alone else 1, figsize=(9, 3.5), layout="constrained", squeeze=False)
    left = axes[0, 0]
    left.set(xlabel="step", ylabel="training loss")
    if alone:
        left.plot(alone, linewidth=3, color="gold", label="one process")
        axes[0, 1].plot([abs(a - b) for a, b in zip(losses, alone, strict=True)], ".", markersize=2)
        axes[0, 1].set(xlabel="step", ylabel="difference of the losses")
    left.plot(losses, linewidth=0.4, label="trainers and server")
    left.legend()
    for each in axes.flat:
        each.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def role(rank: int) -> str:
    """Returns the name of the process with this rank."""
    return [COORDINATOR, SERVER][rank] if rank < 2 else f"trainer{rank - 2}"


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs one process of the group."""
    name = role(rank)
    rpc.init_rpc(name)
    try:
        if name == COORDINATOR:
            coordinate(args)
        rpc.shutdown()
    except WorkerLostError as lost:
        rpc.shutdown(graceful=False)
        sys.exit(f"{name}: {lost}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training data (default 3)")
    parser.add_argument(
        "--trainers", type=int, default=2, help="trainers to start (default 2); ignored under a launcher"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step (default 128)")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate of SGD (default 1)")
    parser.add_argument("--vocabulary", type=int, default=1000, help="rows of the table (default 1000)")
    parser.add_argument("--width", type=int, default=32, help="width of a row (default 32)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layer (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--compare", action="store_true", help="also train in one process, and compare the losses")
    parser.add_argument("--plot", type=Path, help="plot the losses into this PNG file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args()


def main() -> None:
    """Runs one role under a launcher; otherwise starts a process for each role."""
    args = parse_arguments()
    launched = launch.this_process()
    if launched is not None:
        args.trainers = launched.world_size - 2
    if args.trainers < 1 or args.epochs < 1:
        sys.exit("there must be at least one trainer (beside a coordinator and a server) and one epoch")
    if args.batch_size < 1 or args.batch_size % args.trainers:
        sys.exit(f"--batch-size {args.batch_size} cannot be shared evenly by {args.trainers} trainers")
    if launched is not None:
        work(launched.rank, args)
        return
    try:
        launch.spawn(work, 2 + args.trainers, (args,))
    except ProcessExitedException as failed:
        sys.exit(str(failed))


if __name__ == "__main__":
    main()
