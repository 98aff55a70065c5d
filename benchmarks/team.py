"""Processes that are measured: a team does what it is asked to, and is stopped while others are measured.

A worker of TensorPipe spins on a core even when nobody calls it, and threads of others wake now and then. So each
of the programs that are compared has a team of its own, and while one runs all others are stopped (SIGSTOP).
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

__all__ = ["WARM_UP", "Team", "turns"]

WARM_UP = 5
"""Steps at the beginning of each turn that do not count: the first ones wake what has been stopped."""

PATIENCE = 120.0
"""Seconds that a process may take to answer."""

Start = Callable[[str, int, int, str], Callable[[], None]]
"""Joins the others, given the team's name, a rank, the number of ranks and a URL where they meet. It returns what
is to be called in the end."""

_context = multiprocessing.get_context("forkserver")
# torch.optim loads torch._dynamo late
_context.set_forkserver_preload(["benchmarks.systems", "torch._dynamo", "gradwire.c10d"])


@final
class Team:
    """Processes on this host, stopped but within `running`. To be used in a with statement.

    Args:
        name: what they run, for people.
        size: how many there are.
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

    def __enter__(self) -> "Team":
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
                process.join(PATIENCE)
        self._end()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In this block, the processes run."""
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Has rank 0 run a function."""
        self._connections[0].send((function, args))
        return self._answer(0)

    def ask_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Has all run a function at the same time; what each returns."""
        for connection in self._connections:
            connection.send((function, args))
        return [self._answer(rank) for rank in range(self.size)]

    def _answer(self, rank: int) -> Any:
        who = f"rank {rank} of {self.name}"
        if not self._connections[rank].poll(PATIENCE):
            raise RuntimeError(f"{who} does not answer for {PATIENCE:g} s")
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


def turns(teams: Sequence[Team], rounds: int) -> Iterator[Team]:
    """The teams in turns, running: who is first changes, so what else the machine does meets all alike."""
    for number in range(rounds):
        for team in teams if number % 2 == 0 else reversed(teams):
            with team.running():
                yield team


def _work(connection: Connection, start: Start, name: str, rank: int, size: int, url: str) -> None:
    """A process."""
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
