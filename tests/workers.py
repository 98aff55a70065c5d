"""Worker processes for tests, forked in milliseconds from a server process that has torch loaded.

    def test_greeting(workers):
        a, b = workers(2)
        pending = a.start(slow_function)       # returns at once
        assert b.run(lambda: 6 * 7) == 42      # waits
        assert pending.result() == "done"

A worker runs the functions that it is given on its main thread, in order. They travel by cloudpickle. An error is
raised in the test as itself, with the worker's traceback in a note. When a test fails, its report has the output
and the stacks of all its workers.
"""

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

import cloudpickle

from tests.servers import of_this_run

T = TypeVar("T")

RESULT_TIMEOUT_S = 60.0
"""Seconds that a result may take unless the test says otherwise."""

EXIT_TIMEOUT_S = 2.0
"""Seconds that workers may take to exit after a test, before they are killed."""

BUSY_EXIT_TIMEOUT_S = 0.3
"""The same for workers that have not answered the test by then: most of them wait for what never comes."""

EXIT_STATUS_TIMEOUT_S = 30.0
"""Seconds that the fork server may take to tell how a worker has ended."""

TEST_PROCESS = "PYTEST_XDIST_WORKER"
"""The environment variable that names the process of a parallel test run. By it, workers choose free ports."""

TRANSPORTS = os.environ.get("GRADWIRE_TEST_TRANSPORTS", "unix,tcp,grpc").split(",")
"""What may carry the messages of workers, unless a test says otherwise."""

_context = multiprocessing.get_context("forkserver")


def use_fork_server() -> None:
    """Has multiprocessing use the fork server of this test run, in place of one for each process."""
    resource_tracker.ensure_running()
    if _server._forkserver_alive_fd is None:  # in a process that was not forked from it
        servers = of_this_run()
        _server._forkserver_address = str(servers.workers)
        _server._forkserver_alive_fd = servers.alive


_server: Any = forkserver._forkserver
_server.ensure_running = use_fork_server


class WorkerDiedError(AssertionError):
    """A worker process ended while the test waited for it."""


class Pending(Generic[T]):
    """The result of a function that a worker runs, as a future."""

    def __init__(self, worker: "Worker", number: int) -> None:
        self._worker = worker
        self._number = number

    def done(self) -> bool:
        """Returns whether the worker has answered."""
        return self._worker._has_answer(self._number)

    def result(self, seconds: float = RESULT_TIMEOUT_S) -> T:
        """Waits for the function's result and returns it, or raises its exception.

        Raises:
            TimeoutError: the worker did not answer within `seconds`.
            WorkerDiedError: its process has ended.
        """
        ok, value, text = self._worker._answer(self._number, seconds)
        if ok:
            return value  # type: ignore[no-any-return]
        value.add_note(f"--- on {self._worker.name} (pid {self._worker.pid}) ---\n{text}")
        raise value


class Worker:
    """One worker process, seen from the test."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.ends_last = False  # whether the other workers of the test need it until they have ended
        self._stopped = False
        self._numbers = itertools.count()
        self._unanswered = 0
        self._answers: dict[int, tuple[bool, Any, str]] = {}
        self._connection, theirs = _context.Pipe()
        self.process: BaseProcess = _context.Process(
            target=_worker_main, args=(theirs, str(log), os.environ.get(TEST_PROCESS)), name=name, daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    def start(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Pending[T]:
        """Has the worker run `function(*args, **kwargs)` after what it was given before. Returns at once."""
        number = next(self._numbers)
        message = pickle.dumps((number, cloudpickle.dumps((function, args, kwargs))))
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise self._died() from None
        self._unanswered += 1
        return Pending(self, number)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a function on the worker and waits for its result."""
        return self.start(function, *args, **kwargs).result()

    def kill(self) -> None:
        """Kills the process with SIGKILL, and waits until it is gone."""
        self.process.kill()
        self.process.join()

    def ask_to_exit(self) -> None:
        """Has the worker exit once it has run what it was given before. Does not wait for it."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(b"")

    def stop(self, began: float) -> None:
        """Waits for the worker to exit, and kills it if it takes too long since `began` of the monotonic clock."""
        limit = BUSY_EXIT_TIMEOUT_S if self._is_busy() else EXIT_TIMEOUT_S
        self.process.join(max(0.0, began + limit - time.monotonic()))
        if self.process.is_alive():
            self.kill()
        self._connection.close()
        self.process.close()
        self._stopped = True

    def describe(self) -> str:
        """Returns the worker's output, which ends with the stacks of its threads if it is alive."""
        if not self._stopped and self.process.is_alive():
            size = self._log_bytes()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and self._log_bytes() == size:
                time.sleep(0.01)  # faulthandler writes from a signal handler and tells nobody
        state = "alive"
        if self._stopped:
            state = "stopped"
        elif not self.process.is_alive():
            state = f"exit code {self.process.exitcode}"
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"({state})\n{text[-20_000:]}"

    def _log_bytes(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0  # the worker makes it, when it has begun

    def _is_busy(self) -> bool:
        """Returns whether it still runs a function that it was given."""
        with contextlib.suppress(EOFError, OSError):
            while self._unanswered and self._connection.poll(0):
                self._connection.recv_bytes()
                self._unanswered -= 1
        return self._unanswered > 0

    def _has_answer(self, number: int) -> bool:
        while number not in self._answers and self._connection.poll(0):
            self._receive()
        return number in self._answers

    def _answer(self, number: int, seconds: float) -> tuple[bool, Any, str]:
        deadline = time.monotonic() + seconds
        while number not in self._answers:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{self.name} did not answer within {seconds:g} s\n{self.describe()}")
            self._receive()
        return self._answers.pop(number)

    def _receive(self) -> None:
        try:
            number, ok, value, text = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        self._unanswered -= 1
        self._answers[number] = (ok, value, text)

    def _died(self) -> WorkerDiedError:
        self.process.join(EXIT_STATUS_TIMEOUT_S)
        return WorkerDiedError(f"{self.name} died {self.describe()}")


class Workers:
    """The workers of one test: call it for more of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Worker] = []

    def __call__(self, count: int) -> list[Worker]:
        """Starts `count` workers."""
        first = len(self.all)
        for number in range(first, first + count):
            name = f"worker{number}"
            self.all.append(Worker(name, self.folder / f"{name}.log"))
        return self.all[first:]

    def each(self, workers: Sequence[Worker], function: Callable[..., T], *args: Any) -> list[T]:
        """Runs a function on several workers at once."""
        pending = [worker.start(function, *args) for worker in workers]
        return [p.result() for p in pending]

    def rpc(self, count: int, **options: Any) -> list[Worker]:
        """Starts `count` workers that form an RPC group; they are named worker0, worker1, …

        Args:
            count: the number of workers.
            options: of RpcBackendOptions.
        """
        started = self(count)
        self.join_rpc(started, **options)
        return started

    def join_rpc(self, members: Sequence[Worker], **options: Any) -> None:
        """Has workers form an RPC group; options are those of RpcBackendOptions."""
        url = f"file://{self.folder / 'rendezvous'}"
        options.setdefault("transports", TRANSPORTS)
        pending = [
            worker.start(_init_rpc, worker.name, rank, len(members), url, options)
            for rank, worker in enumerate(members)
        ]
        for p in pending:
            p.result()

    def stop(self) -> None:
        """Ends all of them, at once: some end together only, such as the ranks of MPI."""
        for ends_last in False, True:
            ending = [worker for worker in self.all if worker.ends_last == ends_last]
            for worker in ending:
                worker.ask_to_exit()
            began = time.monotonic()
            for worker in ending:
                worker.stop(began)


def _init_rpc(name: str, rank: int, world_size: int, url: str, options: dict[str, Any]) -> None:
    from gradwire import rpc

    rpc.init_rpc(
        name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=url, **options),
    )


def _worker_main(connection: Connection, log: str, test_process: str | None) -> None:
    if test_process is not None:
        os.environ[TEST_PROCESS] = test_process
    gc.freeze()  # what the fork server loaded stays: collections need not look at it
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # A shell that starts the tests in the background has them ignore Ctrl-C, which some of them send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=output)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    with contextlib.suppress(EOFError):  # the test process is gone
        while message := connection.recv_bytes():
            connection.send_bytes(_run_command(message))


def _run_command(message: bytes) -> bytes:
    """Runs a numbered function; returns the pickled (number, succeeded, value or error, traceback)."""
    number, command = pickle.loads(message)
    try:
        function, args, kwargs = pickle.loads(command)
        return cloudpickle.dumps((number, True, function(*args, **kwargs), ""))
    except BaseException as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr)
        try:
            answer = cloudpickle.dumps((number, False, error, text))
            pickle.loads(answer)
        except Exception:
            return pickle.dumps((number, False, AssertionError(f"{type(error).__name__}: {error}"), text))
        return answer
