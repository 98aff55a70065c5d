"""Train a language model whose embedding and decoder are on a server.

Two processes: a server with the parts of the model that grow with the vocabulary, the word embedding and the
decoder, and a trainer with the LSTM in between. In each step the trainer sends words to the server, gets their
vectors, runs the LSTM, and sends its output and the target words to the server, which computes the loss. So
neither the two tables nor the logits are sent. The backward pass and a DistributedOptimizer update each part on
its worker.

    python examples/rnn.py                                     # starts both processes itself
    python examples/rnn.py --compare --plot perplexity.png
    torchrun --nproc-per-node 2 examples/rnn.py                # one process per role

The text is that of Python's `help("topics")`, 92,000 words and punctuation marks in Python 3.11.
"""

import argparse
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from gradwire import autograd, launch, rpc
from gradwire.errors import WorkerLostError
from gradwire.optim import DistributedOptimizer, clip_grad_norm_
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional as F
from tqdm import tqdm

NAMES = ["trainer", "server"]
UNKNOWN = "?"
"""The token of words that occur only once."""
COLUMNS = 20
"""The batch size: the text is divided into this many columns, which are read in parallel."""
STEPS = 32
"""Words of each column in one training step (truncated backpropagation through time)."""
MAX_GRAD_NORM = 1.0
"""The norm to which gradients are clipped."""

State = tuple[Tensor, Tensor]
Curve = tuple[list[float], list[float]]


class Text:
    """The text as word indices, a tenth of it for testing."""

    def __init__(self, length: int) -> None:
        """Reads the first `length` words."""
        words = re.findall(r"\w+|[^\w\s]+|\n\n", "\n\n".join(topics.values()))[:length]
        counts = Counter(words)
        self.vocabulary = [UNKNOWN, *sorted(word for word in counts if counts[word] > 1)]
        numbers = {word: number for number, word in enumerate(self.vocabulary)}
        tokens = torch.tensor([numbers.get(word, 0) for word in words])
        rows = len(tokens) // COLUMNS
        columns = tokens[: rows * COLUMNS].view(COLUMNS, rows).t().contiguous()  # row i: the i-th words
        self.test, self.train = columns[: rows // 10], columns[rows // 10 :]

    @staticmethod
    def pieces(columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields words (up to STEPS, COLUMNS) and the word that follows each, both int64."""
        for start in range(0, len(columns) - 1, STEPS):
            end = min(start + STEPS, len(columns) - 1)
            yield columns[start:end], columns[start + 1 : end + 1]


class Tables(nn.Module):
    """The layers that grow with the vocabulary, word embedding and decoder; they are on the server."""

    def __init__(self, words: int, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(words, width)
        self.decoder = nn.Linear(width, words)

    def embed(self, words: Tensor) -> Tensor:
        """Returns the vectors (..., width) of words (...)."""
        vectors: Tensor = self.embedding(words)
        return vectors

    def loss(self, hidden: Tensor, following: Tensor) -> Tensor:
        """Returns the mean cross entropy, in nats, of the following words (...), given `hidden` (..., width)."""
        return F.cross_entropy(self.decoder(hidden).flatten(0, -2), following.flatten())

    @torch.no_grad()
    def probabilities(self, hidden: Tensor, temperature: float) -> Tensor:
        """Returns the probability of each word to be the next one, (..., words)."""
        return F.softmax(self.decoder(hidden) / temperature, -1)

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Returns references to the parameters, for the optimizer of the trainer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Model:
    """The LSTM and the tables, which are a module of this process or a proxy of a remote one."""

    def __init__(self, tables: Any, width: int, seed: int) -> None:
        torch.manual_seed(seed + 1)
        self.tables, self.lstm = tables, nn.LSTM(width, width)

    def loss(self, words: Tensor, following: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Returns the mean loss of the predictions, and the LSTM's state after the last word."""
        hidden, (h, c) = self.lstm(self.tables.embed(words), state)
        return self.tables.loss(hidden, following), (h.detach(), c.detach())

    def step(self, words: Tensor, following: Tensor, state: State | None) -> tuple[float, State]:
        """Trains on a piece of text; returns the loss, and the LSTM's state after it."""
        raise NotImplementedError

    @torch.no_grad()
    def perplexity(self, columns: Tensor) -> float:
        """Returns the perplexity, the exponential of the mean cross entropy."""
        total, count, state = 0.0, 0, None
        for words, following in Text.pieces(columns):
            loss, state = self.loss(words, following, state)
            total, count = total + loss.item() * len(words), count + len(words)
        return math.exp(total / count)

    @torch.no_grad()
    def sample(self, length: int, temperature: float, generator: torch.Generator) -> Iterator[int]:
        """Generates word indices, sampled from the model's predictions without UNKNOWN."""
        word, state = torch.zeros(1, 1, dtype=torch.int64), None
        for _ in range(length):
            hidden, state = self.lstm(self.tables.embed(word), state)
            probabilities = self.tables.probabilities(hidden, temperature).flatten()
            probabilities[0] = 0
            word = torch.multinomial(probabilities, 1, generator=generator).view(1, 1)
            yield int(word)


class TwoWorkers(Model):
    """The model with its LSTM in this process and its tables on the server."""

    def __init__(self, words: int, args: argparse.Namespace) -> None:
        tables = rpc.remote("server", Tables, (words, args.width, args.seed)).rpc_sync()
        super().__init__(tables, args.width, args.seed)
        local_rrefs = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        self.parameters = [*tables.parameter_rrefs(), *local_rrefs]
        self.optimizer = DistributedOptimizer(torch.optim.Adam, self.parameters, lr=args.lr)

    def step(self, words: Tensor, following: Tensor, state: State | None) -> tuple[float, State]:
        """Runs the backward pass and the optimizer's step on both workers."""
        with autograd.context() as context_id:
            loss, state = self.loss(words, following, state)
            autograd.backward(context_id, [loss])
            clip_grad_norm_(context_id, self.parameters, MAX_GRAD_NORM)
            self.optimizer.step(context_id)
        return loss.item(), state


class OneProcess(Model):
    """The same model and optimizer in this process, for comparison."""

    def __init__(self, words: int, args: argparse.Namespace) -> None:
        tables = Tables(words, args.width, args.seed)
        super().__init__(tables, args.width, args.seed)
        self.parameters = [*tables.parameters(), *self.lstm.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=args.lr)

    def step(self, words: Tensor, following: Tensor, state: State | None) -> tuple[float, State]:
        """Does the same with torch alone."""
        self.optimizer.zero_grad()
        loss, state = self.loss(words, following, state)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        return loss.item(), state


def train(model: Model, text: Text, title: str, args: argparse.Namespace) -> Curve:
    """Trains for all epochs; returns the losses of all steps, and the test perplexity after each epoch."""
    losses, test = list[float](), [model.perplexity(text.test)]
    pieces = list(text.pieces(text.train))
    for epoch in range(1, args.epochs + 1):
        state = None
        for words, following in tqdm(pieces, f"{title}, epoch {epoch:2}", leave=False, disable=args.quiet):
            loss, state = model.step(words, following, state)
            losses.append(loss)
        test.append(model.perplexity(text.test))
        mean = sum(losses[-len(pieces) :]) / len(pieces)
        print(
            f"{title}, epoch {epoch:2}   perplexity {math.exp(mean):7.1f}   of test text {test[-1]:7.1f}",
            flush=True,
        )
    return losses, test


def run_trainer(args: argparse.Namespace) -> None:
    """Runs the trainer: trains, prints a sample, compares."""
    text = Text(args.words)
    print(f"{text.train.numel():,} training words, {len(text.vocabulary):,} different ones")
    model = TwoWorkers(len(text.vocabulary), args)
    curves = {"two workers": train(model, text, "two workers", args)}
    generator = torch.Generator().manual_seed(args.seed)
    sample = " ".join(text.vocabulary[word] for word in model.sample(args.sample, 0.8, generator))
    for paragraph in re.sub(r" (?=[.,;:)])|(?<=[(]) ", "", sample).split("\n\n"):
        print("\n" + textwrap.fill(paragraph.strip(), 100))
    if args.compare:
        alone = OneProcess(len(text.vocabulary), args)
        curves["one process"] = train(alone, text, "one process", args)
        pairs = zip(*(losses + test for losses, test in curves.values()), strict=True)
        print(f"\nlargest difference between the curves: {max(abs(a - b) for a, b in pairs):g}")
    if args.plot:
        plot(args.plot, curves)
        print(f"plotted in {args.plot}")


def plot(path: Path, curves: dict[str, Curve]) -> None:
    """Plots the perplexities over epochs into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for (name, (losses, test)), style in zip(curves.items(), ["-", "--"], strict=False):
        epochs = range(len(test))
        means = torch.tensor(losses).view(len(test) - 1, -1).mean(1).exp().tolist()
        axes.plot(epochs[1:], means, style, marker="o", label=f"{name}, while learning")
        axes.plot(epochs, test, style, marker="s", label=f"{name}, test text")
    axes.set(xlabel="epoch", ylabel="perplexity", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs one process of the group."""
    rpc.init_rpc(NAMES[rank])  # reads rank, world size and address from the environment
    try:
        if rank == 0:
            run_trainer(args)
        rpc.shutdown()
    except WorkerLostError as lost:
        rpc.shutdown(graceful=False)
        sys.exit(f"{NAMES[rank]}: {lost}")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the text (default 5)")
    parser.add_argument(
        "--words", type=int, default=100_000, help="maximal number of words to use (default 100,000)"
    )
    parser.add_argument("--width", type=int, default=128, help="width of embedding and LSTM (default 128)")
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate of Adam (default 0.004)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--sample", type=int, default=80, help="words to generate after training (default 80)")
    parser.add_argument("--compare", action="store_true", help="also train the same model in one process")
    parser.add_argument("--plot", type=Path, help="plot perplexity over epochs into this PNG file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if min(args.epochs, args.width) < 1 or args.words < 20 * COLUMNS:
        parser.error(f"--epochs and --width must be at least 1, --words at least {20 * COLUMNS}")
    return args


def main() -> None:
    """Runs one role under a launcher; otherwise starts a process for each role."""
    args = parse_arguments()
    launched = launch.this_process()
    if launched is None:
        try:
            launch.spawn(work, len(NAMES), (args,))
        except ProcessExitedException as failed:
            sys.exit(str(failed))
        return
    if launched.world_size != len(NAMES):
        sys.exit("the launcher must start 2 processes: a trainer and a server")
    work(launched.rank, args)


if __name__ == "__main__":
    main()
