"""Serve a network to many users, with their requests combined into batches.

Three processes: a server with a network that classifies handwritten digits, and two clients, each with many users
that send one image, wait for the answer, and send the next. Without batches, each request is processed as it
arrives. With batches, a request waits until there are `--batch-size` of them, or until the first one has waited
for `--max-wait` milliseconds; all are then classified in one forward pass. No thread of the server is blocked
meanwhile: `classify` returns a future.

    python examples/batch_server.py --plot out/batch_server.png      # starts all processes itself
    torchrun --nproc-per-node 3 examples/batch_server.py             # one process per role

Both modes are measured with increasing numbers of users. The data are the digits that ship with scikit-learn.
"""

import argparse
import asyncio
import sys
import threading
import time
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from gradwire import launch, rpc
from gradwire.errors import WorkerLostError
from torch import Tensor, nn
from torch.futures import Future
from torch.multiprocessing.spawn import ProcessExitedException
from torch.nn import functional as F
from tqdm import tqdm

SERVER = "server"
PIXELS = 64


@cache
def load_data() -> tuple[Tensor, Tensor]:
    """Loads images (1797, 64), float32 in [0, 1], and labels (1797,), int64; the clients use the last 300."""
    from sklearn.datasets import load_digits  # a second of processor time, which not all processes need

    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def train_network(args: argparse.Namespace) -> nn.Module:
    """Trains a network to classify the digits, which takes some seconds."""
    images, labels = (data[:-300] for data in load_data())
    torch.manual_seed(args.seed)
    width = args.width
    network = nn.Sequential(
        nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in tqdm(range(args.epochs), "training", leave=False, disable=args.quiet):
        for batch in torch.randperm(len(labels)).unfold(0, 32, 32):
            optimizer.zero_grad()
            torch.autograd.backward([F.cross_entropy(network(images[batch]), labels[batch])])
            optimizer.step()
    return network.eval()


class Server:
    """Classifies images, one by one or in batches."""

    def __init__(self, network: nn.Module, batch_size: int, max_wait_s: float) -> None:
        """Starts the thread that processes batches.

        Args:
            network: maps images (n, 64) to logits (n, 10).
            batch_size: the maximal number of requests in a batch.
            max_wait_s: how long the first request of a batch waits for others, in seconds.
        """
        self.network, self.batch_size, self.max_wait_s = network, batch_size, max_wait_s
        self.num_batches = self.num_batched = 0
        self.requests: SimpleQueue[tuple[Tensor, Future[int]] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.serve, name="batches")
        self.thread.start()

    @torch.no_grad()
    def classify_alone(self, image: Tensor) -> int:
        """Returns the digit in an image (64,)."""
        return int(self.network(image).argmax())

    @rpc.functions.async_execution
    def classify(self, image: Tensor) -> Future[int]:
        """Returns a future of the digit in an image (64,). Raises for a bad image before it can fail a batch."""
        if image.shape != (PIXELS,):
            raise ValueError(f"an image of shape {tuple(image.shape)}: give one of shape ({PIXELS},)")
        digit: Future[int] = Future()
        self.requests.put((image, digit))
        return digit

    def serve(self) -> None:
        """Collects requests into batches and answers them. Runs on a thread of its own."""
        torch.get_num_threads()  # makes the number of threads that is set for the process apply to this thread
        while request := self.requests.get():
            batch, deadline = [request], time.monotonic() + self.max_wait_s
            while len(batch) < self.batch_size:
                try:
                    another = self.requests.get(timeout=max(0.0, deadline - time.monotonic()))
                except Empty:
                    break
                if another is None:  # close() was called: answer the current batch first
                    self.requests.put(None)
                    break
                batch.append(another)
            self.answer(batch)

    @torch.no_grad()
    def answer(self, batch: list[tuple[Tensor, Future[int]]]) -> None:
        """Classifies a batch and completes its futures."""
        self.num_batches += 1
        self.num_batched += len(batch)
        images, answers = zip(*batch, strict=True)
        try:
            digits = self.network(torch.stack(images)).argmax(1).tolist()
        except Exception as error:
            for answer in answers:
                answer.set_exception(error.with_traceback(None))
            return
        for answer, digit in zip(answers, digits, strict=True):
            answer.set_result(digit)

    def close(self) -> None:
        """Stops the thread."""
        self.requests.put(None)
        self.thread.join()


def drive(server: rpc.RRef[Server], method: str, users: int, seconds: float) -> tuple[list[float], int]:
    """Runs concurrent users on a client, in one thread: their calls are awaited in an event loop.

    Args:
        server: the server.
        method: the method of Server to call.
        users: the number of users.
        seconds: how long they send requests.

    Returns:
        The latency of each request in seconds, and the number of correct answers.
    """
    images, labels = (data[-300:] for data in load_data())
    latencies: list[float] = []
    correct = 0

    async def user(number: int) -> None:
        nonlocal correct
        while True:
            number %= len(labels)
            sent = time.perf_counter()
            digit = await getattr(server.rpc_async(), method)(images[number])
            latencies.append(time.perf_counter() - sent)
            correct += digit == labels[number].item()
            number += users
            if time.perf_counter() > end:
                return

    async def all_users() -> None:
        await asyncio.gather(*map(user, range(users)))

    end = time.perf_counter() + seconds
    asyncio.run(all_users())
    return latencies, correct


class Measurement(NamedTuple):
    """The results of one measurement."""

    users: int
    rate: float  # answers per second
    median_ms: float  # latency
    p99_ms: float  # latency
    batch_size: float  # mean
    accuracy: float


def measure(server: Server, method: str, users: int, args: argparse.Namespace) -> Measurement:
    """Measures the server with `users` users on each client."""
    server.num_batches = server.num_batched = 0
    started = time.perf_counter()
    pending = [
        rpc.rpc_async(f"client{index}", drive, (rpc.RRef(server), method, users, args.seconds), timeout=0)
        for index in range(args.clients)
    ]
    latencies: list[float] = []
    correct = 0
    for future in pending:
        client_latencies, client_correct = future.wait()
        latencies += client_latencies
        correct += client_correct
    rate = len(latencies) / (time.perf_counter() - started)
    median_ms, p99_ms = (1000 * torch.tensor(latencies).quantile(torch.tensor([0.5, 0.99]))).tolist()
    batch_size = server.num_batched / server.num_batches if server.num_batches else 1.0
    return Measurement(users * args.clients, rate, median_ms, p99_ms, batch_size, correct / len(latencies))


def serve(args: argparse.Namespace) -> None:
    """Runs the server: trains the network, serves it, measures, and reports."""
    server = Server(train_network(args), args.batch_size, args.max_wait / 1000)
    points = [(method, users) for users in args.users for method in ("classify_alone", "classify")]
    try:
        measure(server, "classify", 1, args)  # warm-up: opens connections, starts threads, loads data
        with tqdm(points, "measuring", leave=False, disable=args.quiet) as bar:
            measured = [measure(server, method, users, args) for method, users in bar]
    finally:
        server.close()
    print("           users   requests/s   median ms   99 % ms   mean batch   accuracy")
    for (method, _), m in zip(points, measured, strict=True):
        how = "batched" if method == "classify" else "alone"
        print(
            f"{how:9}{m.users:7}{m.rate:13,.0f}{m.median_ms:12.1f}{m.p99_ms:10.1f}{m.batch_size:13.1f}{m.accuracy:11.1%}"
        )
    sys.stdout.flush()
    if args.plot:
        plot(args.plot, measured[::2], measured[1::2])
        print(f"rates and latencies are plotted in {args.plot}", flush=True)


def plot(path: Path, alone: list[Measurement], batched: list[Measurement]) -> None:
    """Plots rate and latency over the number of users into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for label, color, measured in (("alone", "tab:blue", alone), ("batched", "tab:red", batched)):
        users = [m.users for m in measured]
        left.plot(users, [m.rate for m in measured], marker="o", color=color, label=label)
        right.plot(users, [m.median_ms for m in measured], marker="o", color=color, label=f"{label}, median")
        right.plot(users, [m.p99_ms for m in measured], ":", color=color, label=f"{label}, 99 %")
    left.set(xlabel="users", ylabel="requests per second", xscale="log", ylim=(0, None))
    right.set(xlabel="users", ylabel="latency, ms", xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xticks(users, users)
        axes.minorticks_off()
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs one process of the group."""
    name = SERVER if rank == 0 else f"client{rank - 1}"
    rpc.init_rpc(name)
    try:
        if name == SERVER:
            serve(args)
        rpc.shutdown()
    except WorkerLostError as lost:
        rpc.shutdown(graceful=False)
        sys.exit(f"{name}: {lost}")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clients", type=int, default=2, help="clients to start (default 2); ignored under a launcher"
    )
    parser.add_argument(
        "--users",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        help="users per client (default 1 2 4 8 16 32)",
    )
    parser.add_argument("--seconds", type=float, default=3, help="duration of a measurement (default 3)")
    parser.add_argument("--batch-size", type=int, default=32, help="maximal requests in a batch (default 32)")
    parser.add_argument(
        "--max-wait", type=float, default=2, help="longest wait for a full batch, milliseconds (default 2)"
    )
    parser.add_argument("--width", type=int, default=3072, help="width of the network's layers (default 3072)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training data (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--plot", type=Path, help="plot rates and latencies into this PNG file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if min(args.clients, args.batch_size, args.width, *args.users) < 1:
        parser.error("--clients, --users, --batch-size and --width must be at least 1")
    return args


def main() -> None:
    """Runs one role under a launcher; otherwise starts a process for each role."""
    args = parse_arguments()
    launched = launch.this_process()
    if launched is None:
        try:
            launch.spawn(work, 1 + args.clients, (args,))
        except ProcessExitedException as failed:
            sys.exit(str(failed))
        return
    args.clients = launched.world_size - 1
    if args.clients < 1:
        sys.exit("the launcher must start at least 2 processes: the server and a client")
    work(launched.rank, args)


if __name__ == "__main__":
    main()
