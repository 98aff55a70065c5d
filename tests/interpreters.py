"""Python programs that run in processes forked from one that has torch loaded, as they do in new interpreters.

    def test_the_command(python):
        assert python.run("-m", "gradwire", "--help").returncode == 0

A new interpreter takes two seconds of processor time until it has loaded torch and gradwire; a forked process
takes a tenth of it. It has the environment, the folder and the output of one, and ends as one, with its exit
handlers, a traceback and an exit status. But torch and gradwire are loaded already: where a test is
about imports, it needs a new interpreter.
"""

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.context
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

from gradwire import launch

__all__ = ["Program", "Python"]

PRELOAD = [
    "gradwire.compat",
    "gradwire.c10d.engines.gloo.engine",
    "gradwire.c10d.engines.shm.engine",
    "numpy",
    "torch._dynamo",  # torch.optim loads it on the first step
]

TIMEOUT_S = 110.0
"""Seconds that a program may take unless the test says otherwise."""

START_TIMEOUT_S = 60.0
"""Seconds that the first process may take to import torch."""

MAX_REQUEST_BYTES = 1 << 17

SERVER = "import sys; sys.path[:] = {path}; from tests.interpreters import serve; serve({control})"


class Program:
    """A program that runs.

    pid: its process id, which is also that of its session and of its process group.
    """

    def __init__(self, arguments: tuple[object, ...], reply: socket.socket) -> None:
        self._arguments = arguments
        self._reply = reply
        self._status: int | None = None
        self.pid = int(self._receive(START_TIMEOUT_S))

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def wait(self, seconds: float = TIMEOUT_S) -> int:
        """Waits until the program has ended; returns its exit status, or the negative number of a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `seconds`.
        """
        if self._status is None:
            self._status = int(self._receive(seconds))
        return self._status

    def kill(self) -> None:
        """Kills the program and its processes if it has not ended."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        finally:
            self._reply.close()

    def _receive(self, seconds: float) -> str:
        self._reply.settimeout(seconds)
        try:
            received = self._reply.recv(100).decode()
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired(list(map(str, self._arguments)), seconds) from None
        assert received, "the process from which programs are forked has ended"
        return received


class Python:
    """Runs programs. Arguments are those of `python`, of which it knows `-c`, `-m` and the path of a script.

    sessions: the process ids of all of them.
    """

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = SERVER.format(path=sys.path, control=theirs.fileno())
        self._server = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()

    def close(self) -> None:
        """Ends the process from which programs are forked. They go on."""
        self._control.close()
        self._server.wait()

    def run(self, *arguments: object, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Runs a program until it ends.

        Raises:
            subprocess.TimeoutExpired: it did not end within `timeout` seconds, and has been killed.
        """
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            with self.start(*arguments, stdout=stdout, stderr=stderr) as program:
                status = program.wait(timeout)
            for output in stdout, stderr:
                output.seek(0)
            return subprocess.CompletedProcess(arguments, status, stdout.read(), stderr.read())

    def start(self, *arguments: object, stdout: IO[str], stderr: IO[str]) -> Program:
        """Starts a program with the environment and the folder of this process, and these files for its output."""
        request = _Request(list(map(str, arguments)), dict(os.environ), os.getcwd())
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._control, [pickle.dumps(request)], descriptors)
        program = Program(arguments, reply)
        self.sessions.add(program.pid)
        return program


# In the process from which programs are forked.


@dataclass(frozen=True)
class _Request:
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def serve(control: int) -> None:
    """Forks programs until the other end is closed, and ends this process. Returns in a program's process."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    if "triton" not in sys.modules:  # whose bindings, in CUDA builds, report what stays as leaks
        gc.freeze()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = socket.socket(fileno=control)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for descriptor in running.keys() & set(ready):
            pid, reply = running.pop(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with reply, contextlib.suppress(OSError):  # the test has given up
                reply.send(str(status).encode())
            os.close(descriptor)
        if requests not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        if (pid := os.fork()) == 0:
            os.setsid()
            break
        reply = socket.socket(fileno=descriptors[0])
        reply.send(str(pid).encode())
        running[os.pidfd_open(pid)] = (pid, reply)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
    signal.signal(signal.SIGINT, interrupt)
    requests.close()
    for descriptor, (_, reply) in running.items():
        os.close(descriptor)
        reply.close()
    for number, descriptor in enumerate(descriptors[1:], 1):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    _be(pickle.loads(message))


def _be(request: _Request) -> None:
    """Runs a program in this process."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _fork_instead_of_spawn()
    path = [each for each in request.environment.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    main = ModuleType("__main__")
    match request.arguments:
        case ["-m", name, *rest]:
            sys.path[:0] = [request.folder, *path]
            sys.argv[:] = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[:0] = ["", *path]
            sys.argv[:] = ["-c", *rest]
            sys.modules["__main__"] = main
            eval(compile(code, "<string>", "exec"), main.__dict__)
        case [script, *rest]:
            sys.path[:0] = [os.path.dirname(script), *path]
            sys.argv[:] = [script, *rest]
            main.__file__ = script
            sys.modules["__main__"] = main
            eval(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _fork_instead_of_spawn() -> None:
    """Makes multiprocessing fork the processes of this program, which it would start as new interpreters."""
    multiprocessing.context.SpawnProcess._Popen = staticmethod(multiprocessing.context.ForkProcess._Popen)
    launch.spawn.__kwdefaults__["start_method"] = "fork"  # so that its store is in a process of its own
