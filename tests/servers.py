"""The two processes from which all workers and programs of a test run are forked: as docs/testing.md says.

One loads torch and gradwire, and forks programs (`tests.interpreters`). The other is forked from it, loads what
workers need besides, and is the fork server of multiprocessing (`tests.workers`). Of the pytest processes of a
run, the first starts them, and tells the others where they are. They end when the last one has ended.
"""

import contextlib
import gc
import importlib
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["PRELOAD", "Servers", "of_this_run", "serve", "use"]

PRELOAD = [
    "click",
    "encodings.idna",
    "gradwire.c10d.engines.gloo",
    "gradwire.c10d.engines.shm.engine",
    "gradwire.net.security.issuing",
    "gradwire.compat",
    "gradwire.extensions",  # of each agent
    "matplotlib.pyplot",
    "numpy",
    "sklearn.datasets",
    "grpc._utilities",
    "grpc.experimental",
    "torch._dynamo",  # torch.optim loads it on the first step
    "torch.distributed.optim",
]
"""Modules that both processes load: what programs need, without any of pytest."""

PRELOAD_FOR_WORKERS = [
    "cloudpickle",
    "cryptography.hazmat.backends.openssl.backend",
    "gymnasium",
    "hypothesis",
    "psutil",
    "pytest",
    "tests.workers",
    "tests.remote_functions",
    "tests.certificates",
    "tests.hosts",
    "tests.ports",
    "tests.stopped",
    "tests.fixtures",
    "tests.rpc.channels.segments",
    "tests.c10d.members",
    "tests.c10d.groups.trainings",
    "tests.huge_pages",  # the last: moves what the others have loaded
]
"""Modules that workers get besides, since nearly all of them need these.

Workers import the test modules whose functions they run, and so what those import: pytest alone took 60 ms of
processor time in each of some 3,000 workers, cryptography 50, and what trains on process groups 500.
"""

LOG = "errors"
"""The file in the folder of the servers that has what they wrote to stderr."""

_SERVER = "import sys; sys.path[:] = {path}; from tests.servers import serve; serve(*{numbers})"


class Servers:
    """The two processes, seen from a process that uses them.

    programs, workers: the paths of their sockets.
    alive: a descriptor. They end when all processes have closed theirs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.workers = folder / "workers"
        try:
            self.alive = os.open(folder / "alive", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise RuntimeError("the processes from which tests are forked have ended: see above why") from error

    @classmethod
    def start(cls) -> "Servers":
        """Starts them, and does not wait until they have loaded anything."""
        folder = Path(tempfile.mkdtemp(prefix="gradwire-tests-"))
        os.mkfifo(folder / "alive", 0o600)
        alive = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)
        servers = cls(folder)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as programs,
            socket.socket(socket.AF_UNIX) as workers,
        ):
            programs.bind(str(servers.programs))
            workers.bind(str(servers.workers))
            for listener in programs, workers:
                listener.listen()
            numbers = [programs.fileno(), workers.fileno(), alive]
            code = _SERVER.format(path=sys.path, numbers=numbers)
            multiprocessing.util.spawnv_passfds(
                os.fsencode(sys.executable), [os.fsencode(sys.executable), b"-c", os.fsencode(code)], numbers
            )
        os.close(alive)
        return servers

    def errors(self) -> str:
        """Returns what they have written to stderr since they are loaded."""
        log = self.folder / LOG
        return log.read_text() if log.exists() else ""

    def close(self) -> None:
        """Has them end when no other process uses them any more."""
        os.close(self.alive)


_of_this_run: list[Servers] = []


def of_this_run() -> Servers:
    """Returns the servers that all processes of this test run share; starts them if there are none."""
    if not _of_this_run:
        _of_this_run.append(Servers.start())
    return _of_this_run[0]


def use(folder: Path) -> None:
    """Has this process use the servers that another one has started."""
    _of_this_run.append(Servers(folder))


# In the two processes themselves.


def serve(programs: int, workers: int, alive: int) -> None:
    """Forks programs and workers until nobody is alive who uses them. Returns in a program's process.

    Args:
        programs: the socket on which `tests.interpreters` asks for programs.
        workers: the socket on which multiprocessing asks for workers.
        alive: is at its end when all processes have ended that use these servers.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends those who use them
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in 0, 1:
        os.dup2(nothing, number)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    if os.fork() == 0:
        os.close(programs)
        _fork_workers(workers, alive, interrupt)
    os.close(workers)
    os.close(nothing)
    if "triton" not in sys.modules:  # whose bindings, in CUDA builds, report what stays as leaks
        gc.freeze()
    from tests.interpreters import fork_programs

    listener = socket.socket(fileno=programs)
    folder = Path(listener.getsockname()).parent
    _log_errors(folder)
    signal.signal(signal.SIGINT, interrupt)
    if fork_programs(listener, alive):
        return
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _log_errors(folder: Path) -> None:
    """Writes errors of this process into a file: those of others that inherit it came among pytest's dots."""
    with contextlib.suppress(FileNotFoundError):  # the run has ended already
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        os.close(log)


def _fork_workers(listener: int, alive: int, interrupt: Any) -> None:
    try:
        for name in PRELOAD_FOR_WORKERS:
            importlib.import_module(name)
        with socket.socket(fileno=os.dup(listener)) as workers:
            _log_errors(Path(workers.getsockname()).parent)
        signal.signal(signal.SIGINT, interrupt)
        with contextlib.suppress(SystemExit):  # nobody uses it any more
            multiprocessing.forkserver.main(listener, alive, [])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
