"""`gradwire spawn`: several processes of a program on this host."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from .examples import Command
from .prefixed_output import PrefixedOutput
from .script_process import ScriptProcess

if TYPE_CHECKING:
    from torch.multiprocessing.spawn import ProcessContext

__all__ = ["command"]

NAME_VARIABLE = "GRADWIRE_WORKER_NAME"
"""The environment variable that has the name of each process."""


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
        self._started: list[ScriptProcess] = []

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

    def _start(self, rank: int, common: Mapping[str, str]) -> ScriptProcess:
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
            process = ScriptProcess(self._command_line, environment, stdout, stderr)
        self._started.append(process)
        return process

    def _close(self) -> None:
        for process in self._started:
            process.close()


def _context(processes: list[ScriptProcess]) -> "ProcessContext":
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
