"""Writes the flight recorders of this process to a file.

With the files of all ranks, `python -m gradwire.c10d.debug.report FILES` says who is stuck where.
"""

import signal
from pathlib import Path
from types import FrameType

from ...torch_internals import known_groups
from ..process_group import ProcessGroup
from .flight_recorder import write

__all__ = ["dump_flight_recorder", "dump_flight_recorder_on_signal"]


def dump_flight_recorder(folder: Path | str) -> Path:
    """Writes the last operations of all of gradwire's groups in this process to a file in `folder`; its path."""
    return write([group for group in known_groups() if isinstance(group, ProcessGroup)], Path(folder))


def dump_flight_recorder_on_signal(folder: Path | str, number: int = signal.SIGUSR1) -> None:
    """Has a signal do so. Must be called on the main thread.

    What the main thread does goes on afterwards; the file is written once it lets Python run, which gradwire's
    engines do while they wait.
    """

    def handle(_: int, __: FrameType | None) -> None:
        dump_flight_recorder(folder)

    signal.signal(number, handle)
