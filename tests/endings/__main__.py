"""Ends programs in every way, again and again, at moments chosen at random: none may hang.

    python -m tests.endings --runs 1000

Each run has two workers: one that ends in some way (the subject), and a peer that calls it meanwhile. Their exit
statuses must be those of docs/call_failures.md. The processes are forked from one that has torch loaded, and end
with their interpreter, as those of a script do. When one does not end, the stacks of both are printed, and they
are killed.
"""

import argparse
import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gradwire import rpc
from gradwire.errors import RpcError

from tests.interpreters import Python

__all__ = ["WAYS", "Report", "endings"]

ROOT = Path(__file__).parent.parent.parent

SUBJECT, PEER = "subject", "peer"

RUN_TIMEOUT_S = 60.0
"""Seconds after which a process counts as hanging, on a busy machine."""

MAX_PAUSE_S = 0.03
"""Seconds that pass at most from when the subject is ready to what ends it."""


@dataclass(frozen=True)
class Way:
    """How the subject ends.

    end: what its main thread does when it is a worker.
    statuses: its possible exit statuses; negative numbers are those of signals.
    signals: what is sent to it.
    kills_peer: whether the peer is killed meanwhile.
    waits: whether the peer calls the subject until that is lost; else for a moment.
    """

    end: Callable[[], None]
    statuses: tuple[int, ...] = (0,)
    signals: tuple[signal.Signals, ...] = ()
    kills_peer: bool = False
    waits: bool = True


@dataclass
class Report:
    """How the runs of one way have ended.

    hangs: the stacks of each process that did not end.
    wrong: the statuses that were not as they should be, and the stderr of these processes.
    """

    way: str
    runs: int = 0
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.way}: {self.runs} runs, {len(self.hangs)} hangs, {len(self.wrong)} wrong statuses"


# What the subject does.

_ready = -1
"""The descriptor by which the subject says that it is ready."""


def tell_ready() -> None:
    """Says that this process may be sent signals from now on."""
    os.write(_ready, b"r")


def pause() -> None:
    """Waits for a moment, which differs from run to run."""
    time.sleep(random.uniform(0, MAX_PAUSE_S))


def end_at_once(*_: object) -> None:
    rpc.shutdown(graceful=False)


def end_gracefully_and_exit(*_: object) -> None:
    rpc.shutdown()
    sys.exit(4)


def end_at_once_and_exit(*_: object) -> None:
    rpc.shutdown(graceful=False)
    sys.exit(3)


def exit_by_signal(*_: object) -> None:
    sys.exit(3)


def wait_in_shutdown() -> None:
    rpc.shutdown()
    assert not rpc.is_initialized()


def by_handler(handler: Callable[..., None], wait: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, handler)
    tell_ready()
    wait()


def call_for_ever() -> None:
    while True:
        rpc.rpc_sync(PEER, os.getpid)


def call_and_be_idle() -> None:
    rpc.rpc_sync(PEER, os.getpid)
    threading.Event().wait()


def by_thread() -> None:
    tell_ready()
    threading.Thread(target=lambda: (pause(), end_at_once())).start()
    wait_in_shutdown()


def by_timeout() -> None:
    tell_ready()
    with contextlib.suppress(RpcError):
        rpc.shutdown(timeout=0.05)
    assert not rpc.is_initialized()


def by_many() -> None:
    """Several threads end it in different ways, and again."""
    tell_ready()

    def end() -> None:
        for _ in range(2):
            pause()
            with contextlib.suppress(RpcError):
                random.choice([rpc.shutdown, end_at_once, functools.partial(rpc.shutdown, timeout=0.01)])()

    threads = [threading.Thread(target=end) for _ in range(3)]
    for thread in threads:
        thread.start()
    pause()
    end_at_once()
    for thread in threads:
        thread.join()
    wait_in_shutdown()


def by_remote_call() -> None:
    rpc.rpc_async(PEER, call_back, (end_at_once,))
    tell_ready()
    wait_in_shutdown()


def by_graceful_remote_call() -> None:
    rpc.rpc_async(PEER, call_back, (rpc.shutdown,))
    tell_ready()
    threading.Event().wait(0.05)
    wait_in_shutdown()


def call_back(function: Callable[..., Any]) -> None:
    pause()
    rpc.rpc_async(SUBJECT, function)


def by_callback() -> None:
    tell_ready()
    rpc.rpc_async(PEER, pause).then(end_at_once)
    wait_in_shutdown()


class EndsTheAgent:
    """An object in a cycle, which ends the agent when it is collected."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        rpc.shutdown(graceful=False)


def make_garbage() -> None:
    EndsTheAgent()
    gc.collect()


def by_finalizer() -> None:
    rpc.rpc_async(PEER, call_back, (make_garbage,))
    tell_ready()
    wait_in_shutdown()


def at_exit(function: Callable[..., None]) -> None:
    atexit.register(function)
    tell_ready()


def by_error() -> None:
    tell_ready()
    raise ValueError("no bread")


def in_shutdown() -> None:
    tell_ready()
    wait_in_shutdown()


part = functools.partial

TERM, INT = signal.SIGTERM, signal.SIGINT

WAYS: dict[str, Way] = {
    "handler": Way(part(by_handler, end_at_once, wait_in_shutdown), signals=(TERM,)),
    "handler during calls": Way(part(by_handler, end_at_once_and_exit, call_for_ever), (3,), (TERM,)),
    "handler while idle": Way(part(by_handler, end_at_once_and_exit, call_and_be_idle), (3,), (TERM,)),
    # The second signal may come when the interpreter has ended its handlers.
    "handler twice": Way(part(by_handler, end_at_once, wait_in_shutdown), (0, -TERM), (TERM, TERM)),
    # It may have ended before the signal, also here.
    "graceful handler": Way(
        part(by_handler, end_gracefully_and_exit, wait_in_shutdown), (4, 0, -TERM), (TERM,), waits=False
    ),
    "graceful handler during calls": Way(
        part(by_handler, end_gracefully_and_exit, call_for_ever), (4,), (TERM,), waits=False
    ),
    "thread": Way(by_thread),
    "timeout": Way(by_timeout),
    "twice": Way(by_many),
    "remote call": Way(by_remote_call),
    "graceful remote call": Way(by_graceful_remote_call, waits=False),
    "callback": Way(by_callback),
    "finalizer": Way(by_finalizer),
    "atexit": Way(part(at_exit, rpc.shutdown), waits=False),
    "atexit at once": Way(part(at_exit, end_at_once)),
    "no shutdown": Way(tell_ready),
    "error": Way(by_error, (1,)),
    "SIGTERM": Way(in_shutdown, (-TERM,), (TERM,)),
    "SIGTERM that exits": Way(part(by_handler, exit_by_signal, wait_in_shutdown), (3,), (TERM,)),
    "Ctrl-C": Way(in_shutdown, (-INT,), (INT,)),
    "Ctrl-C twice": Way(in_shutdown, (-INT,), (INT, INT)),
    "peer killed": Way(in_shutdown, kills_peer=True),
    "peer killed and handler": Way(
        part(by_handler, end_at_once, wait_in_shutdown), (0, -TERM), (TERM,), kills_peer=True
    ),
    "peer killed and graceful handler": Way(
        part(by_handler, end_gracefully_and_exit, wait_in_shutdown), (4, 0, -TERM), (TERM,), kills_peer=True
    ),
}


# In the processes of a run.


def be_peer(*, waits: bool) -> None:
    """Calls the subject, until that is lost or for a moment, and shuts down."""
    with contextlib.suppress(RpcError):
        for number in iter(int, 1) if waits else range(random.randrange(20)):
            assert rpc.rpc_sync(SUBJECT, abs, (number,)) == number
    rpc.shutdown()
    os._exit(0)  # without the half second that torch's interpreter takes


def be_worker(name: str, way: Way, url: str, rank: int) -> None:
    """Runs a worker, on the main thread of its process."""
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=url)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if name == SUBJECT:
        way.end()
    else:
        be_peer(waits=way.waits or way.kills_peer)


# In the process from which they are forked.


def serve(first: int, runs: int, folder: Path, names: Sequence[str]) -> None:
    """Runs some ways again and again. Returns in this process, and in each that it has forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("torch._dynamo")
    if "triton" not in sys.modules:  # whose bindings, in CUDA builds, report what stays as leaks
        gc.freeze()
    reports = {name: Report(name) for name in names}
    for number in range(first, first + runs):
        for name in names:
            run = _Run(name, number, folder)
            if not run.fork():
                return
            run.end()
            run.judge(reports[name])
    (folder / "reports").write_text(json.dumps([vars(each) for each in reports.values()]))


class _Run:
    """One run of one way."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self._title = f"{name}, run {number}"
        self._way = WAYS[name]
        self._place = folder / f"{name.replace(' ', '-')}-{number}"
        self._children: dict[str, int] = {}
        random.seed(self._title)

    def fork(self) -> bool:
        """Starts the two workers, at once. Returns whether this process is none of them."""
        rank = random.randrange(2)
        ready, theirs = os.pipe()
        for worker, its_rank in ((SUBJECT, rank), (PEER, 1 - rank)):
            child = os.fork()
            if child == 0:
                global _ready
                _ready = theirs
                os.close(ready)
                _write_to(self._output(worker))
                be_worker(worker, self._way, f"file://{self._place}", its_rank)
                return False
            self._children[worker] = child
        os.close(theirs)
        select.select([ready], [], [], RUN_TIMEOUT_S)
        os.close(ready)
        return True

    def _output(self, worker: str) -> Path:
        return Path(f"{self._place}.{worker}")

    def end(self) -> None:
        """Does to the workers what is done from outside."""
        todo = [(self._children[SUBJECT], number) for number in self._way.signals]
        if self._way.kills_peer:
            todo.append((self._children[PEER], signal.SIGKILL))
        random.shuffle(todo)
        for process, number in todo:
            pause()
            os.kill(process, number)

    def judge(self, report: Report) -> None:
        """Waits for the workers to end, and adds to a report how they have ended."""
        report.runs += 1
        statuses = {SUBJECT: self._way.statuses, PEER: (0,)}
        if self._way.kills_peer:
            statuses[PEER] = (0, -signal.SIGKILL)  # it may end before
        deadline = time.monotonic() + RUN_TIMEOUT_S
        for worker, child in self._children.items():
            descriptor = os.pidfd_open(child)
            has_ended = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            os.close(descriptor)
            if not has_ended:
                report.hangs += self._kill()
                return
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status not in statuses[worker]:
                text = self._output(worker).read_text(errors="replace")
                report.wrong.append(f"{self._title}: {worker} has ended with {status}\n{text}")
        for worker in self._children:
            self._output(worker).unlink()

    def _kill(self) -> list[str]:
        """Kills the workers; returns their output, with the stacks of those that run."""
        for signal_number in signal.SIGUSR1, signal.SIGKILL:
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal_number)
            time.sleep(1)  # faulthandler tells nobody when it has written them
        for child in self._children.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
        return [
            f"{self._title}: {each}\n{self._output(each).read_text(errors='replace')}" for each in self._children
        ]


def _write_to(path: Path) -> None:
    """Has this process write its output, and its stacks when it gets SIGUSR1, to a file."""
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for number in 1, 2:
        os.dup2(output, number)
    os.close(output)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


# In the process that reports.


def endings(first: int, runs: int, python: Python, names: Sequence[str]) -> list[Report]:
    """Runs some ways `runs` times each, with the random moments of the runs from `first` on."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = RUN_TIMEOUT_S * (1 + runs * len(names))
        done = python.run("-m", __spec__.name, "--serve", first, runs, folder, *names, timeout=seconds)
        if done.returncode:
            return [Report(", ".join(names), wrong=[done.stderr])]
        return [Report(**each) for each in json.loads(Path(folder, "reports").read_text())]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.endings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="of each way (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first run (default 0)")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="ways that run at a time")
    parser.add_argument("ways", nargs="*", default=[*WAYS], help=f"of {', '.join(map(repr, WAYS))} (default: all)")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    total: Counter[str] = Counter()
    run = functools.partial(endings, arguments.first, arguments.runs, Python())
    with ThreadPoolExecutor(arguments.at_once) as threads:
        for report in itertools.chain.from_iterable(threads.map(run, [[way] for way in arguments.ways])):
            print(report, flush=True)
            for text in [*report.hangs, *report.wrong][:6]:
                print(text, flush=True)
            total.update(runs=report.runs, hangs=len(report.hangs), wrong=len(report.wrong))
    print(f"in all: {total['runs']} runs, {total['hangs']} hangs, {total['wrong']} wrong statuses")
    return int(bool(total["hangs"] + total["wrong"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    else:
        sys.exit(main())
