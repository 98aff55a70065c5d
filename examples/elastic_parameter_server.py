"""Train a network, whichever of its processes is killed meanwhile.

A server has the parameters, and hands out tasks: the gradient of these parameters for this share of this batch.
A trainer sends the gradient back, and gets its next task in the same call. When the server has the gradients of
all shares of a batch, it updates the parameters; now and then it saves a checkpoint.

    python examples/elastic_parameter_server.py            # starts all processes itself
    python examples/elastic_parameter_server.py --chaos    # … and kills each of them, and adds a trainer
    python examples/elastic_parameter_server.py --join 127.0.0.1:29500    # adds a trainer; it prints the address

`launch.spawn` starts a killed process again under its old name. Nothing is lost, because

- a trainer has no state, and a task is handed out again until its gradient has arrived;
- a gradient is the same whoever computes it, so one that arrives twice does no harm;
- a server that begins from its checkpoint repeats the steps since then, and the trainers repeat their calls to it.

So the result is the same as without disturbance, to the last bit. With --chaos, the program shows both.

The data are the 1,797 digits of 8 x 8 pixels that ship with scikit-learn (Alpaydin and Kaynak, 1998).
"""

import argparse
import os
import signal
import tempfile
from collections import Counter, deque
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Event, Thread
from typing import Any, ClassVar

import torch
from gradwire import c10d, launch, rpc
from gradwire.c10d.stores.durable import serve as serve_store
from gradwire.errors import UnknownWorkerError, WorkerLostError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STORE, SERVER, CHAOS = "store", "server", "chaos"

STORE_LOG = "store.log"

SHARES = 4
"""Tasks in each batch."""

STEPS_PER_CHECKPOINT = 25

MAX_AWAY_S = 120.0
"""Seconds for which a worker that is called may be away."""

Task = tuple[int, int, Tensor, Tensor, Tensor]
"""The step, the share, the parameters, and the images (n, 1, 8, 8) and labels (n,) of the share."""

Result = tuple[int, int, Tensor]
"""The step, the share, and the gradient."""


def load_digits() -> tuple[Tensor, Tensor]:
    """Loads images (1797, 1, 8, 8), float32 in [0, 1], and labels (1797,), int64, in random order."""
    from sklearn import datasets  # a second of processor time, which only the server needs

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(digits.target)[order]


def make_network() -> nn.Module:
    """Returns a network that makes logits (n, 10) from images (n, 1, 8, 8)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


class Server:
    """Has the parameters, as one vector, and hands out tasks. It goes on from the checkpoint, if there is one."""

    current: ClassVar["Server"]
    """The one of this process, if it runs the server."""

    def __init__(self, args: argparse.Namespace, checkpoint: Path | None) -> None:
        self.args, self.checkpoint = args, checkpoint
        images, labels = load_digits()
        count = len(labels) // 5
        self.test, self.images, self.labels = (images[:count], labels[:count]), images[count:], labels[count:]
        self.steps_per_epoch = len(self.labels) // args.batch_size
        self.last_step = args.epochs * self.steps_per_epoch
        torch.manual_seed(args.seed)
        self.network = make_network()
        self.parameters = nn.Parameter(parameters_to_vector(self.network.parameters()).detach())
        self.optimizer = torch.optim.SGD([self.parameters], lr=args.lr, momentum=args.momentum)
        self.step = 0
        self.changed = Condition()
        self.finished_by: Counter[str] = Counter()
        if checkpoint is not None and checkpoint.exists():
            saved = torch.load(checkpoint)
            self.step = saved["step"]
            self.parameters.data = saved["parameters"]
            self.optimizer.load_state_dict(saved["optimizer"])
        self.begin_step()

    def begin_step(self) -> None:
        """Makes the tasks of the next batch."""
        self.sent_parameters = self.parameters.detach().clone()  # which does not change while it is sent
        self.gradients: dict[int, Tensor] = {}
        self.waiting = deque(range(SHARES))

    def exchange(self, trainer: str, result: Result | None) -> Task | None:
        """Takes a trainer's gradient, and returns its next task; None when the training is over."""
        with self.changed:
            if result is not None and result[0] == self.step:  # not of a step that is over, or not repeated yet
                _, share, self.gradients[share] = result
                self.finished_by[trainer] += 1
                if len(self.gradients) == SHARES:
                    self.update()
            return self.next_task() if self.step < self.last_step else None

    def next_task(self) -> Task:
        """Returns an unfinished task: one that has not been handed out, or else that which was the longest ago."""
        share = next(each for each in self.waiting if each not in self.gradients)
        self.waiting.remove(share)
        self.waiting.append(share)
        epoch, batch = divmod(self.step, self.steps_per_epoch)
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(self.args.seed + epoch))
        chosen = order.split(self.args.batch_size)[batch].tensor_split(SHARES)[share]
        return self.step, share, self.sent_parameters, self.images[chosen], self.labels[chosen]

    def update(self) -> None:
        """Updates the parameters by the gradients of all shares, in their order, which rounding depends on."""
        gradients = torch.stack([self.gradients[share] for share in range(SHARES)])
        self.parameters.grad = gradients.sum(0) / self.args.batch_size
        self.optimizer.step()
        self.step += 1
        if self.checkpoint and (self.step % STEPS_PER_CHECKPOINT == 0 or self.step == self.last_step):
            self.save(self.checkpoint)
        if self.checkpoint and self.step % self.steps_per_epoch == 0:
            work = ", ".join(f"{name} {count}" for name, count in sorted(self.finished_by.items()))
            epoch = self.step // self.steps_per_epoch
            print(f"epoch {epoch:3}   test accuracy {self.evaluate():.2%}   tasks: {work}", flush=True)
            self.finished_by.clear()
        self.begin_step()
        self.changed.notify_all()

    def save(self, checkpoint: Path) -> None:
        """Saves a checkpoint. The file is always whole: the new one replaces the old one at once."""
        new = checkpoint.with_suffix(".new")
        state = {"step": self.step, "parameters": self.parameters.data, "optimizer": self.optimizer.state_dict()}
        torch.save(state, new)
        new.replace(checkpoint)

    def wait_for_step(self, step: int) -> None:
        """Waits until the training has come to this step."""
        with self.changed:
            self.changed.wait_for(lambda: self.step >= step)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the fraction of test images that are classified correctly."""
        images, labels = self.test
        vector_to_parameters(self.parameters, self.network.parameters())
        return (self.network(images).argmax(1) == labels).double().mean().item()


def compute_gradient(network: nn.Module, task: Task) -> Result:
    """Does a task. The gradient is that of the sum of the losses of all images."""
    step, share, parameters, images, labels = task
    vector_to_parameters(parameters, network.parameters())
    loss = F.cross_entropy(network(images), labels, reduction="sum")
    return step, share, parameters_to_vector(torch.autograd.grad(loss, list(network.parameters())))


# What the workers call.


def call(name: str, function: Any, *args: Any) -> Any:
    """Calls a worker; while it is away, waits for it to be back, and calls it again."""
    back = Event()
    with rpc.on_worker_joined(lambda worker: worker.name == name and back.set()):
        while True:
            back.clear()
            try:
                return rpc.rpc_sync(name, function, args, timeout=0)
            except (WorkerLostError, UnknownWorkerError):
                if not back.wait(MAX_AWAY_S):
                    raise


def exchange(trainer: str, result: Result | None) -> Task | None:
    """Server.exchange of the server."""
    return Server.current.exchange(trainer, result)


def wait_for_part(part: float) -> None:
    """Waits until this part of the training is done."""
    Server.current.wait_for_step(round(part * Server.current.last_step))


# The processes.


def address() -> tuple[str, int]:
    """Returns the host and port of the store."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def join(name: str) -> c10d.Store:
    """Joins the group as a worker; returns the store."""
    store = c10d.TCPStore(*address())
    rpc.init_rpc(name, store=store)  # without a world size, so that workers come and go
    return store


def keep_store(log: Path) -> None:
    """Runs the store, whose changes are in its log, until the training is over."""
    stopped = Event()
    Thread(target=stop_when_over, args=(stopped,), daemon=True).start()
    serve_store(str(log), *address(), stopped)


def stop_when_over(stopped: Event) -> None:
    """Tells others the process of the store, and ends it when the training is over."""
    with c10d.TCPStore(*address()) as store:
        store.set(STORE, str(os.getpid()))
        store.wait(["over"], timedelta(days=365))
    stopped.set()


def serve(args: argparse.Namespace) -> None:
    """Runs the server until the training is over and all other workers have left."""
    Server.current = server = Server(args, args.folder / "checkpoint.pt")
    host, port = address()
    print(f"server: begins at step {server.step}; --join {host}:{port} adds a trainer", flush=True)
    store = join(SERVER)
    server.wait_for_step(server.last_step)
    left = Event()
    with rpc.on_worker_left(lambda *_: left.set()):
        while len(rpc.get_worker_infos()) > 1:
            left.wait()
            left.clear()
    rpc.shutdown()
    store.set("over", "")


def train(name: str) -> None:
    """Runs a trainer until the training is over."""
    torch.set_num_threads(1)  # the same in all trainers: rounding depends on it
    join(name)
    network, result = make_network(), None
    while (task := call(SERVER, exchange, name, result)) is not None:
        result = compute_gradient(network, task)
    rpc.shutdown()


def disturb(trainers: int) -> None:
    """Adds a trainer, and kills all roles in turn, at even intervals of the training."""
    workers = {SERVER, *(f"trainer{index}" for index in range(trainers))}
    names = [STORE, *sorted(workers)]
    store = join(CHAOS)
    joined: SimpleQueue[str] = SimpleQueue()
    with rpc.on_worker_joined(lambda worker: joined.put(worker.name)) as handle:
        wait_for_all(workers - {worker.name for worker in handle.workers}, joined)
        added = get_context("spawn").Process(target=train, args=(f"trainer{trainers}",), daemon=True)
        added.start()
        for number, name in enumerate(names, 1):
            call(SERVER, wait_for_part, number / (len(names) + 1))
            pid = int(store.get(STORE)) if name == STORE else call(name, os.getpid)
            print(f"kill -9 {pid} ({name})", flush=True)
            os.kill(pid, signal.SIGKILL)
        wait_for_all(workers, joined)
    added.join()
    rpc.shutdown()


def wait_for_all(names: set[str], joined: SimpleQueue[str]) -> None:
    """Waits until workers with these names have joined."""
    while names:
        names = names - {joined.get()}


def work(rank: int, args: argparse.Namespace) -> None:
    """Runs the process of a rank."""
    if rank == 0:
        keep_store(args.folder / STORE_LOG)
    elif rank == 1:
        serve(args)
    elif rank < 2 + args.trainers:
        train(f"trainer{rank - 2}")
    else:
        disturb(args.trainers)


def compare(args: argparse.Namespace) -> None:
    """Trains again in this process, without disturbance, and compares the results."""
    torch.set_num_threads(1)  # as in the trainers
    disturbed, alone = Server(args, args.folder / "checkpoint.pt"), Server(args, None)
    result = None
    while (task := alone.exchange("alone", result)) is not None:
        result = compute_gradient(alone.network, task)
    print(f"test accuracy {disturbed.evaluate():.2%}; of an undisturbed run {alone.evaluate():.2%}")
    difference = (disturbed.parameters - alone.parameters).abs().max().item()
    print(f"largest difference between their parameters: {difference:g}")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data (default 30)")
    parser.add_argument("--trainers", type=int, default=2, help="trainers to start (default 2)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step (default 64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD (default 0.05)")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD (default 0.9)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here, and begin from it if there is one")
    parser.add_argument("--chaos", action="store_true", help="kill each process in turn, and add a trainer")
    parser.add_argument("--join", metavar="HOST:PORT", help="only add a trainer, to a program at this address")
    args = parser.parse_args()
    if args.trainers < 1 or args.epochs < 1 or args.batch_size < SHARES:
        parser.error(f"--trainers and --epochs must be at least 1, --batch-size {SHARES}")
    return args


def main() -> None:
    """Starts all processes, or adds a trainer."""
    args = parse_arguments()
    if args.join:
        os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = args.join.rpartition(":")
        train(f"trainer-{os.getpid()}")
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or Path(folder)
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / STORE_LOG).unlink(missing_ok=True)  # of an earlier program
        launch.spawn(work, 2 + args.trainers + args.chaos, (args,), restarts=10)
        if args.chaos:
            compare(args)


if __name__ == "__main__":
    main()
