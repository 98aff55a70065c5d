"""The worker processes of a benchmark: one set for each system, stopped while another set is measured.

A worker of TensorPipe spins on a core even when nobody calls it, and threads of other systems wake now and then.
So each system has workers of its own, and while one set runs all others are stopped (SIGSTOP).
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, final

__all__ = ["WARM_UP", "Start", "WorkerSet", "preload", "take_turns"]

WARM_UP = 5
"""Steps at the beginning of each round, at most, that are not counted: they wake threads that were stopped."""

ANSWER_TIMEOUT_S = 120.0
"""Seconds that a process may take to answer."""

Start = Callable[[str, int, int, str], Callable[[], None]]
"""Starts a worker, given the name of the set, a rank, the number of ranks and the URL of the rendezvous; returns a
function that ends it."""

_context = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Has the fork server of this process load what workers need, before the first one is started.

    Called by commands only, since a process has one fork server: that of the tests loads other modules.
    """
    _context.set_forkserver_preload(["benchmarks.systems", "torch._dynamo", "gradwire.c10d"])  # for torch.optim
    first = _context.Process(target=os.getpid)
    first.start()
    first.join()


@final
class WorkerSet:
    """Worker processes on this host, stopped except inside `running`. A context manager.

    Args:
        name: of the system that they run.
        size: the number of processes.
        start: a function at the top level of a module.
    """

    def __init__(self, name: str, size: int, start: Start) -> None:
        self.name = name
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-benchmark-")
        url = f"file://{self._folder.name}/rendezvous"
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_work, args=(theirs, start, name, rank, size, url), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def __enter__(self) -> "WorkerSet":
        try:
            for rank in range(self.size):
                self._answer(rank)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._signal(signal.SIGCONT)
        if kind is None:
            for connection in self._connections:
                connection.send(None)
            for process in self._processes:
                process.join(ANSWER_TIMEOUT_S)
        self._end()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager inside which the processes run."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function on rank 0 and returns its result."""
        self._connections[0].send((function, args))
        return self._answer(0)

    def ask_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a function on all ranks at the same time; returns their results by rank."""
        for connection in self._connections:
            connection.send((function, args))
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank: int) -> Any:
        who = f"rank {rank} of {self.name}"
        if not self._connections[rank].poll(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"{who} does not answer for {ANSWER_TIMEOUT_S:g} s")
        try:
            value, error = self._connections[rank].recv()
        except EOFError:
            raise RuntimeError(f"{who} has died") from None
        if error:
            raise RuntimeError(f"{who} failed:\n{error}")
        return value

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def _end(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self._folder.cleanup()


def take_turns(sets: Sequence[WorkerSet], rounds: int) -> Iterator[WorkerSet]:
    """Yields each set, running, `rounds` times; the order alternates, so that other load affects all alike."""
    for number in range(rounds):
        for worker_set in sets if number % 2 == 0 else reversed(sets):
            with worker_set.running():
                yield worker_set


def _work(connection: Connection, start: Start, name: str, rank: int, size: int, url: str) -> None:
    """Runs in a worker process."""
    stop = start(name, rank, size, url)
    connection.send((None, ""))
    while (request := connection.recv()) is not None:
        function, args = request
        try:
            answer = function(*args), ""
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
    stop()
