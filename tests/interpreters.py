"""Python programs that run in processes forked from one that has torch loaded, as they do in new interpreters.

    def test_the_command(python):
        assert python.run("-m", "gradwire", "--help").returncode == 0

A new interpreter takes two seconds of processor time until it has loaded torch and gradwire; a forked process
takes a tenth of it. It has the environment, the folder and the output of one, and ends as one, with its exit
handlers, a traceback and an exit status. But torch and gradwire are loaded already: where a test is
about imports, it needs a new interpreter.

Launchers such as mpiexec start what `python.executable` names, in place of `sys.executable`: a small program that
has such a process forked, passes its signals on to it, and ends as it ends.
"""

import contextlib
import fcntl
import importlib
import json
import multiprocessing
import multiprocessing.context
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import psutil
import torch
from gradwire import launch

from tests.servers import Servers, of_this_run

__all__ = ["Program", "Python", "fork_programs", "have_ended"]

TIMEOUT_S = 110.0
"""Seconds that a program may take unless the test says otherwise."""

START_TIMEOUT_S = 100.0
"""Seconds that the first process may take to import torch."""

MAX_REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 64

_FREE_DESCRIPTORS = 500
"""From here on, descriptors are not used by programs that have just started."""

EXECUTABLE = """\
#!{python} -IS
import json, os, signal, socket, sys
arguments = sys.argv[1:]
if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-c", "-m", "-u"):
    os.execv({python!r}, [{python!r}, *arguments])
numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if number < 3]
signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the program runs that they are for
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        if number > 2 and os.get_inheritable(number):
            numbers.append(number)
    except OSError:
        pass  # the folder itself
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = [arguments, dict(os.environ), os.getcwd(), numbers, {log!r}, True]
socket.send_fds(server, [json.dumps(request).encode()], numbers)
pid = int(server.recv(100))
def pass_on(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended
for number in signals:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
status = int(server.recv(100) or -9)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""What `Python.executable` names. It runs a new interpreter after all where it does not know the options."""


class Program:
    """A program that runs.

    pid: its process id, which is also that of its session and of its process group.
    """

    def __init__(self, arguments: tuple[object, ...], reply: socket.socket) -> None:
        self._arguments = arguments
        self._reply = reply
        self._status: int | None = None
        try:
            self.pid = int(self._receive(START_TIMEOUT_S))
        except BaseException:
            reply.close()
            raise

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
            _kill(self.pid)
            self.wait()
        finally:
            self._reply.close()

    def _receive(self, seconds: float) -> str:
        self._reply.settimeout(seconds)
        try:
            received = self._reply.recv(100).decode()
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired(list(map(str, self._arguments)), seconds) from None
        assert received, f"the process from which programs are forked has ended: {of_this_run().errors()}"
        return received


class Python:
    """Runs programs. Arguments are those of `python`, of which it knows `-c`, `-m` and the path of a script.

    executable: runs a program too, for those who want the path of an interpreter. The program does not outlive it.
    """

    def __init__(self, servers: Servers | None = None) -> None:
        """Runs programs that are forked by the servers of this test run, unless others are given."""
        self._address = str((servers or of_this_run()).programs)
        self._folder = tempfile.TemporaryDirectory()
        self._sessions = Path(self._folder.name, "sessions")
        self.executable = Path(self._folder.name, "python")
        self.executable.write_text(
            EXECUTABLE.format(python=sys.executable, address=self._address, log=str(self._sessions))
        )
        self.executable.chmod(0o700)

    @property
    def sessions(self) -> set[int]:
        """The sessions of all programs, which are the process ids of these."""
        return set(map(int, self._sessions.read_text().split())) if self._sessions.exists() else set()

    def close(self) -> None:
        """Removes `executable`. Programs that run go on."""
        self._folder.cleanup()

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
        log = str(self._sessions)
        request = [list(map(str, arguments)), dict(os.environ), os.getcwd(), [1, 2], log, False]
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            server.connect(self._address)
            socket.send_fds(server, [json.dumps(request).encode()], [stdout.fileno(), stderr.fileno()])
        except BaseException:
            server.close()
            raise
        return Program(arguments, server)


# In the process from which programs are forked.


def fork_programs(listener: socket.socket, alive: int) -> bool:
    """Forks programs for those who connect, until `alive` is at its end.

    Returns:
        Whether this process is that of a program, which has run.
    """
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    programs = _Programs()
    while True:
        ready, _, _ = select.select([alive, listener, *programs.watched()], [], [])
        programs.handle(ready)
        if alive in ready:
            return False
        if listener not in ready:
            continue
        reply, _ = listener.accept()
        message, descriptors, _, _ = socket.recv_fds(reply, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if message:
            *request, log, is_command = json.loads(message)
            if programs.start(reply, Path(log), is_command=is_command):
                break
        for descriptor in descriptors:
            os.close(descriptor)
    signal.signal(signal.SIGINT, interrupt)
    os.close(alive)
    listener.close()
    programs.close()
    arguments, environment, folder, numbers = request
    _move(descriptors, numbers)
    os.execv = _become  # of `gradwire run`, which replaces itself by the program
    before = sys.path[:]
    while True:
        try:
            _be(arguments, environment, folder)
            return True
        except _OtherProgram as other:
            arguments, environment, folder = other.arguments, dict(os.environ), os.getcwd()
            sys.path[:] = before


class _Programs:
    """The programs that run, in the process from which they were forked."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
        self._commands: dict[socket.socket, int] = {}  # those whose programs end with them

    def watched(self) -> list[Any]:
        """Returns what is readable when a program has ended, or who has asked for one."""
        return [*self._running, *self._commands]

    def start(self, reply: socket.socket, log: Path, *, is_command: bool) -> bool:
        """Forks a program, and says which process it is, to `log` too. Returns whether this is that process."""
        if (pid := os.fork()) == 0:
            os.setsid()
            reply.close()
            return True
        with contextlib.suppress(FileNotFoundError), log.open("a") as sessions:  # who asked for it is gone
            print(pid, file=sessions)
        with contextlib.suppress(OSError):  # who asked for it is gone, as `handle` will see
            reply.send(str(pid).encode())
        self._running[os.pidfd_open(pid)] = (pid, reply)
        if is_command:
            self._commands[reply] = pid
        return False

    def handle(self, ready: list[Any]) -> None:
        """Tells how programs have ended, and kills those whose commands were killed."""
        for descriptor in self._running.keys() & set(ready):
            pid, reply = self._running.pop(descriptor)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._commands.pop(reply, None)
            with reply, contextlib.suppress(OSError):  # the test has given up
                reply.send(str(status).encode())
            os.close(descriptor)
        for reply in self._commands.keys() & set(ready):
            _kill(self._commands.pop(reply))

    def close(self) -> None:
        """Forgets all programs, in the process of one."""
        for descriptor, (_, reply) in self._running.items():
            os.close(descriptor)
            reply.close()


def _kill(program: int) -> None:
    """Kills a program and its processes."""
    for kill in os.killpg, os.kill:  # just after its fork, the program has no process group yet
        with contextlib.suppress(ProcessLookupError):
            kill(program, signal.SIGKILL)


def _move(descriptors: list[int], numbers: list[int]) -> None:
    """Gives descriptors other numbers."""
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE_DESCRIPTORS) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


class _OtherProgram(BaseException):
    """This process becomes that of another program."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self.arguments = arguments


def _become(path: str, arguments: list[str]) -> None:
    if path != sys.executable:
        os.execve(path, arguments, os.environ)
    raise _OtherProgram(arguments[1:])


def _run_sitecustomize() -> None:
    """Does what Python does at the start of an interpreter."""
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")


def _be(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Runs a program in this process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _renew_thread_pool()
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for stream in sys.stdout, sys.stderr:
            stream.reconfigure(write_through=True)
    _fork_instead_of_spawn()
    path = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each not in sys.path]
    main = ModuleType("__main__")
    match arguments:
        case ["-m", name, *rest]:
            sys.path[:0] = [folder, *path]
            _run_sitecustomize()
            sys.argv[:] = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[:0] = ["", *path]
            _run_sitecustomize()
            sys.argv[:] = ["-c", *rest]
            sys.modules["__main__"] = main
            eval(compile(code, "<string>", "exec"), main.__dict__)
        case [script, *rest]:
            sys.path[:0] = [os.path.dirname(script), *path]
            _run_sitecustomize()
            sys.argv[:] = [script, *rest]
            main.__file__ = script
            sys.modules["__main__"] = main
            eval(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _renew_thread_pool() -> None:
    """Has torch remake its pool of threads now: on the first use after a fork, two threads at once would abort."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork_instead_of_spawn() -> None:
    """Makes multiprocessing fork the processes of this program, which it would start as new interpreters."""
    spawned: Any = multiprocessing.context.SpawnProcess
    spawned._after_fork = staticmethod(_renew_thread_pool)
    spawned._Popen = staticmethod(multiprocessing.context.ForkProcess._Popen)
    launch.spawn.__kwdefaults__["start_method"] = "fork"  # so that its store is in a process of its own


def have_ended(processes: list[psutil.Process]) -> bool:
    """Returns whether all of these processes, which are no children, have ended."""
    try:
        return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)
    except psutil.NoSuchProcess:  # one has ended in between
        return False
