"""`gradwire spawn`: several processes of a program on this host, and their output as lines with names in front."""

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, Final, Self, final

import click

from .group import Command

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

__all__ = ["PrefixedOutput", "command"]

READ_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 1 << 16
"""A longer line is written in parts."""

NAME_VARIABLE = "GRADWIRE_WORKER_NAME"
"""The environment variable that has the name of each process."""


@dataclass(slots=True)
class _Pipe:
    """The reading end of a pipe, and what has been read of a line."""

    descriptor: int
    prefix: bytes
    target: BinaryIO
    line: bytearray = field(default_factory=bytearray)


@final
class PrefixedOutput:
    """Copies lines from pipes to streams of this process, on a thread that ends with the context."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._new: deque[_Pipe] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="gradwire-spawn-output", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Writes what is in the pipes by now, and ends the thread."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    @contextmanager
    def pipe(self, name: str, target: BinaryIO) -> Iterator[int]:
        """Context manager for starting a process; its value is a descriptor for what the process prints.

        Args:
            name: what is put in front of each line.
            target: where the lines go.
        """
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._new.append(_Pipe(reading, f"[{name}] ".encode(), target))
        os.eventfd_write(self._wake, 1)
        try:
            yield writing
        finally:
            os.close(writing)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            is_closing = False
            while not is_closing:
                ready = [key.data for key, _ in selector.select() if key.data is not None]
                is_closing = self._is_closing  # what is in the pipes from now on may stay there
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                while self._new:
                    pipe = self._new.popleft()
                    selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
                for pipe in ready:
                    if not _copy(pipe):
                        _finish(pipe, selector)
            for pipe in [key.data for key in selector.get_map().values() if key.data is not None]:
                left = fcntl.fcntl(pipe.descriptor, fcntl.F_GETPIPE_SZ)  # what a process left may write for ever
                while left > 0 and (copied := _copy(pipe)):
                    left -= copied
                _finish(pipe, selector)


def _copy(pipe: _Pipe) -> int:
    """Copies lines that have arrived. Returns the number of bytes; 0 if there are none, or there will be none."""
    try:
        data = os.read(pipe.descriptor, READ_BYTES)
    except BlockingIOError:
        return 0
    *lines, rest = (pipe.line + data).split(b"\n")
    if len(rest) > MAX_LINE_BYTES:
        lines, rest = [*lines, rest], bytearray()
    _write(pipe, lines)
    pipe.line = rest
    return len(data)


def _finish(pipe: _Pipe, selector: selectors.BaseSelector) -> None:
    if pipe.line:
        _write(pipe, [pipe.line])
    selector.unregister(pipe.descriptor)
    os.close(pipe.descriptor)


def _write(pipe: _Pipe, lines: list[bytearray]) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever reads this has left; the processes go on
        pipe.target.write(b"".join(pipe.prefix + line + b"\n" for line in lines))
        pipe.target.flush()


_PR_SET_PDEATHSIG: Final = 1

_BOOT: Final = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the launcher has died before that
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Becomes a program that dies with the launcher, however that ends."""


@final
class _ScriptProcess:
    """A process of a Python program. It leads a process group, so that Ctrl-C reaches the launcher only.

    It has what torch's ProcessContext uses of multiprocessing's processes.

    pid: the id of the process.
    sentinel: a file descriptor that can be read when the process has ended.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Starts `python` with these arguments and variables. The process dies with the thread that calls this."""
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            process_group=0,
        )
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self) -> int | None:
        """The exit status, or the negative number of the signal that killed it; None while it runs."""
        return self._popen.poll()

    def is_alive(self) -> bool:
        """Returns whether the process runs."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Waits until the process has ended, or for `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)

    def terminate(self) -> None:
        """Sends SIGTERM to the process and those that it has started, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process and those that it has started, unless it has ended."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Closes the sentinel."""
        os.close(self.sentinel)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            os.killpg(self.pid, number)


def _parse_names(_ctx: click.Context, _option: click.Parameter, text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = text.split(",")
    if len(set(names)) < len(names) or not all(name.strip() == name and name for name in names):
        raise click.BadParameter(f"{text!r}: give different names, with commas and nothing else between them")
    return names


@click.command(
    "spawn",
    context_settings={"allow_interspersed_args": False},
    cls=Command,
    epilog="""
    gradwire spawn 4 train.py --epochs 3
    gradwire spawn --restarts 3 --names server,trainer0,trainer1 3 train.py
    gradwire spawn 2 -m gradwire.compat torch_program.py     # as `gradwire run` does, in each process
    """,
)
@click.option(
    "--names",
    metavar="NAMES",
    callback=_parse_names,
    help="The names of the ranks, with commas between them; by default worker0,worker1 and so on. A process finds "
    f"its own in {NAME_VARIABLE}.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How often the process of each rank is started again when it has failed.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="When a process has failed for good, or on Ctrl-C, the others have so long to end.",
)
@click.option(
    "--prefix/--no-prefix",
    "has_prefix",
    default=True,
    show_default=True,
    help="Put its name in front of each line.",
)
@click.argument("nprocs", metavar="N", type=click.IntRange(1))
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    names: list[str] | None,
    restarts: int,
    grace: float,
    has_prefix: bool,
    nprocs: int,
    program: str,
    arguments: tuple[str, ...],
) -> int:
    """Starts N processes of a program on this host, and waits for them.

    PROGRAM is a script, or `-m` before the name of a module. Options come before N. Each process has the variables
    that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR and so on), and those of a store that lets in nobody else:
    init_rpc(name) finds the others.

    The exit status is that of the process that failed first, 128 and the signal's number if it was killed. On
    Ctrl-C and SIGTERM all of them end.
    """
    names = names or [f"worker{rank}" for rank in range(nprocs)]
    if len(names) != nprocs:
        raise click.UsageError(f"there are {len(names)} names for {nprocs} processes: give as many")
    if program.startswith("-") and (program != "-m" or not arguments):
        raise click.UsageError(f"{program} is no program: options of gradwire spawn come before N")
    if program != "-m" and not os.path.exists(program):
        raise click.ClickException(f"there is no file {program!r}")
    return _Launch(names, [program, *arguments], restarts, grace, has_prefix=has_prefix).run()


class _Launch:
    """The processes of one `gradwire spawn`."""

    def __init__(
        self, names: list[str], command_line: list[str], restarts: int, grace: float, *, has_prefix: bool
    ) -> None:
        self._names = names
        self._command_line = command_line
        self._restarts = restarts
        self._grace = grace
        self._has_prefix = has_prefix
        self._output: PrefixedOutput | None = None
        self._started: list[_ScriptProcess] = []

    def run(self) -> int:
        """Runs all processes to their end; returns the exit status."""
        from torch.multiprocessing.spawn import ProcessExitedException

        from ..launch.hosting import hosted_spawn_store, worker_environment
        from ..launch.supervisor import Backoff, describe_exit, supervise

        with ExitStack() as stack:
            if self._has_prefix:
                self._output = stack.enter_context(PrefixedOutput())
            stack.enter_context(_sigterm_raises())
            store = stack.enter_context(hosted_spawn_store())
            stack.callback(self._close)

            def start(rank: int, restart: int) -> "ProcessContext":
                common = worker_environment(store, len(self._names), restart, self._restarts)
                return _context([self._start(rank, common)])

            try:
                common = worker_environment(store, len(self._names), 0, self._restarts)
                supervise(
                    _context([self._start(rank, common) for rank in range(len(self._names))]),
                    start,
                    restarts=self._restarts,
                    backoff=Backoff(),
                    grace_period=self._grace,
                )
            except ProcessExitedException as error:
                name = self._names[error.error_index]
                click.echo(f"{name} (pid {error.error_pid}) {describe_exit(error)}", err=True)
                return error.exit_code if error.exit_code >= 0 else 128 - error.exit_code
        return 0

    def _start(self, rank: int, common: Mapping[str, str]) -> _ScriptProcess:
        name = self._names[rank]
        threads = max(1, len(os.sched_getaffinity(0)) // len(self._names))
        environment = {
            "OMP_NUM_THREADS": str(threads),  # else torch uses all cores in every process
            "PYTHONUNBUFFERED": "1",  # so that lines appear when they are printed
            **os.environ,
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            NAME_VARIABLE: name,
        }
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # if torchrun has started this process
        with ExitStack() as pipes:
            if self._output is None:
                stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
            else:
                stdout = pipes.enter_context(self._output.pipe(name, sys.stdout.buffer))
                stderr = pipes.enter_context(self._output.pipe(name, sys.stderr.buffer))
            process = _ScriptProcess(self._command_line, environment, stdout, stderr)
        self._started.append(process)
        return process

    def _close(self) -> None:
        for process in self._started:
            process.close()


def _context(processes: list[_ScriptProcess]) -> "ProcessContext":
    """Returns processes as torch's context of processes; they leave no files with tracebacks."""
    from torch.multiprocessing.spawn import ProcessContext

    return ProcessContext(processes, [""] * len(processes))  # type: ignore[no-untyped-call]


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Context manager in which SIGTERM ends this process by SystemExit, so that it ends its processes."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
