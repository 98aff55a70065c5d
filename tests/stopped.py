"""Workers that are stopped for a while, as by Ctrl-Z, and go on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.remote_functions import wait_until
from tests.workers import Worker

__all__ = ["has_stopped", "stopped"]


def has_stopped(process: int) -> bool:
    """Returns whether no thread of a process runs any more, which takes a moment after SIGSTOP."""
    try:
        states = [stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{process}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
        return False
    return set(states) == {"T"}


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    """Has a worker stopped inside of the block."""
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: has_stopped(worker.pid))
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)
