"""Writes the flight recorders of this process to a file.

`gradwire flight FILES` reads the files of all ranks and says which rank is stuck where.
"""

import logging
import signal
from pathlib import Path
from types import FrameType

from ...torch_internals import known_groups
from ..debug.flight_recorder import write_flight_records
from .process_group import ProcessGroup

__all__ = ["dump_flight_recorder", "dump_flight_recorder_on_signal"]

log = logging.getLogger(__name__)


def dump_flight_recorder(folder: Path | str) -> Path:
    """Writes the last operations of all of gradwire's groups in this process to a file in `folder`.

    Returns:
        The file's path.
    """
    groups = [group.flight_record() for group in list(known_groups()) if isinstance(group, ProcessGroup)]
    return write_flight_records(groups, Path(folder))


def dump_flight_recorder_on_signal(folder: Path | str, number: int = signal.SIGUSR1) -> None:
    """Installs a signal handler that calls `dump_flight_recorder(folder)`. Must be called on the main thread.

    The program goes on afterwards, also if that fails, which is logged. The handler runs when the
    main thread next executes Python code, which gradwire's engines do while they wait.
    """

    def handle(_: int, __: FrameType | None) -> None:
        try:
            dump_flight_recorder(folder)
        except Exception as error:  # would be raised wherever the main thread is
            log.warning("cannot write the flight recorder to %s: %s", folder, error)

    signal.signal(number, handle)
