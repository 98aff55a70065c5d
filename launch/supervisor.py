"""Waits for the processes that `launch.spawn` has started, and starts those again that fail."""

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import final

from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException

__all__ = ["TRACEBACK", "Backoff", "describe_exit", "end_all", "error_line", "supervise"]

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
class _History:
    """What has become of one rank: its restarts, the last pause, and the start of its process or of the next."""

    started: float
    restarts: int = 0
    pause: float | None = None


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
        grace_period: of `ProcessContext.join` and of `end_all`, in seconds.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a process raised once more than it is restarted.
        torch.multiprocessing.ProcessExitedException: the same for one that was killed, or exited with an error.
    """
    try:
        histories = [_History(time.monotonic()) for _ in context.processes]
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
                    history.pause = backoff.next_pause(history.pause, time.monotonic() - history.started)
                    history.restarts += 1
                    history.started = time.monotonic() + history.pause
                    waiting.add(rank)
                    _report(rank, process, context.error_files[rank], history, restarts)
            for rank in [rank for rank in waiting if histories[rank].started <= time.monotonic()]:
                waiting.remove(rank)
                again = start(rank, histories[rank].restarts)
                (context.processes[rank],) = again.processes
                (context.error_files[rank],) = again.error_files
                context.sentinels[context.processes[rank].sentinel] = rank
    except BaseException:  # the processes are no daemons: multiprocessing would wait for them at exit
        end_all(context.processes, grace_period)
        raise


def _report(rank: int, process: BaseProcess, error_file: str, history: _History, restarts: int) -> None:
    """Logs in one line that a process is started again; at level INFO also the traceback of what it raised."""
    end, traceback = _describe_end(process, error_file)
    if traceback:
        log.info("process %d raised\n%s", rank, traceback)
    log.warning(
        "process %d (pid %d) %s; it is started again in %g s (restart %d of %d)",
        rank,
        process.pid,
        end,
        history.pause,
        history.restarts,
        restarts,
    )


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


def end_all(processes: Iterable[BaseProcess], grace_period: float) -> None:
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
