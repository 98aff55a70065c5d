"""Waits for the processes that `launch.spawn` has started, and starts those again that fail."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import final

from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException

__all__ = ["TRACEBACK", "Backoff", "History", "describe_exit", "error_line", "supervise"]

TRACEBACK = "Traceback (most recent call last):"
"""How tracebacks begin."""

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The pauses before a process that has failed is started again. Each is twice as long as the one before.

    initial: the first pause, in seconds; 0 for no pauses.
    maximum: the pause, in seconds, that none exceeds.
    reset_after: after a process that has run for longer than this, in seconds, the first pause comes again.
    """

    initial: float = 0.5
    maximum: float = 30.0
    reset_after: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.initial <= self.maximum < math.inf:
            raise ValueError(
                f"the pauses are initial={self.initial!r} and maximum={self.maximum!r}: give seconds, at least 0, "
                "and a maximum that is not below the initial pause"
            )
        if not self.reset_after >= 0:
            raise ValueError(f"reset_after={self.reset_after!r}: give seconds, at least 0")

    def next_pause(self, previous: float | None, ran: float) -> float:
        """Returns the pause, in seconds, before a restart.

        Args:
            previous: the pause before the previous restart of this process; None if there was none.
            ran: for how many seconds the process has run.
        """
        if previous is None or ran > self.reset_after:
            return self.initial
        return min(2 * previous, self.maximum)


@dataclass(slots=True)
class History:
    """What has become of one rank: its restarts, the last pause, and the start of its process or of the next."""

    started: float = field(default_factory=time.monotonic)
    restarts: int = 0
    pause: float | None = None

    def note_failure(self, process: str, end: str, traceback: str, backoff: Backoff, restarts: int) -> None:
        """Chooses when the process is started again, and logs that in one line; a traceback at level INFO.

        Which process has failed, and how, its `end`, are texts.
        """
        self.pause = backoff.next_pause(self.pause, time.monotonic() - self.started)
        self.restarts += 1
        self.started = time.monotonic() + self.pause
        if traceback:
            log.info("%s raised\n%s", process, traceback)
        text = "%s %s; it is started again in %g s (restart %d of %d)"
        log.warning(text, process, end, self.pause, self.restarts, restarts)


def supervise(
    context: ProcessContext,
    start: Callable[[int, int], ProcessContext],
    *,
    restarts: int,
    backoff: Backoff,
    grace_period: float,
) -> None:
    """Waits until the process of every rank has succeeded.

    A process that fails is started again after a pause, `restarts` times at most. When a process fails once more,
    the others end as `ProcessContext.join` has them end, and its error is raised. On any other exception, such as
    KeyboardInterrupt, all processes are ended.

    Args:
        context: the processes, which have just been started, by rank.
        start: starts a process for a rank that has been restarted so often; returns its context.
        restarts: how often the process of each rank is started again.
        backoff: the pauses.
        grace_period: of `ProcessContext.join` and of `_end_all`, in seconds.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a process raised once more than it is restarted.
        torch.multiprocessing.ProcessExitedException: the same for one that was killed, or exited with an error.
    """
    try:
        histories = [History() for _ in context.processes]
        waiting: set[int] = set()
        while context.sentinels or waiting:
            pause = min((histories[rank].started for rank in waiting), default=math.inf) - time.monotonic()
            for sentinel in wait(context.sentinels, None if pause == math.inf else max(0.0, pause)):
                rank = context.sentinels[sentinel]
                process, history = context.processes[rank], histories[rank]
                process.join()
                if process.exitcode != 0 and history.restarts == restarts:
                    context.sentinels = {sentinel: rank}  # so that this error is raised
                    context.join(grace_period=grace_period)
                del context.sentinels[sentinel]
                if process.exitcode != 0:
                    end, traceback = _describe_end(process, context.error_files[rank])
                    shown = f"process {rank} (pid {process.pid})"
                    history.note_failure(shown, end, traceback, backoff, restarts)
                    waiting.add(rank)
            for rank in [rank for rank in waiting if histories[rank].started <= time.monotonic()]:
                waiting.remove(rank)
                again = start(rank, histories[rank].restarts)
                (context.processes[rank],) = again.processes
                (context.error_files[rank],) = again.error_files
                context.sentinels[context.processes[rank].sentinel] = rank
    except BaseException:  # the processes are no daemons: multiprocessing would wait for them at exit
        _end_all(context.processes, grace_period)
        raise


def _describe_end(process: BaseProcess, error_file: str) -> tuple[str, str]:
    """Returns how a process has failed, in words, and the traceback of what it raised; empty if it did not."""
    try:
        ProcessContext([process], [error_file]).join()  # type: ignore[no-untyped-call]
    except ProcessRaisedException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(error_file)
        traceback = error.msg.partition("error:\n")[2].rstrip()
        return f"raised {error_line(traceback)}", traceback
    except ProcessExitedException as error:
        return describe_exit(error), ""
    raise AssertionError(f"process {process.pid} has not failed")


def describe_exit(error: ProcessExitedException) -> str:
    """Returns how a process has ended, in words."""
    killed = error.signal_name is not None
    return f"was killed by {error.signal_name}" if killed else f"exited with status {error.exit_code}"


def error_line(traceback: str) -> str:
    """Returns the type of the error in a traceback, and the first line of its text."""
    _, header, body = traceback.rpartition(TRACEBACK)
    lines = body.splitlines()
    return next((line for line in lines[1:] if header and not line.startswith(" ")), lines[-1])


def _end_all(processes: Iterable[BaseProcess], grace_period: float) -> None:
    """Ends processes, by SIGTERM and, for those that are left after `grace_period` seconds, by SIGKILL."""
    running = [process for process in processes if process.is_alive()]
    try:
        for process in running:
            process.terminate()
        end = time.monotonic() + grace_period
        for process in running:
            process.join(max(0.0, end - time.monotonic()))
    finally:  # also on another Ctrl-C
        for process in running:
            process.kill()
            process.join()
