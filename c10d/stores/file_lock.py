"""The lock of a file that processes share, and which of them hold it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

from ...errors import StoreError

__all__ = ["FileLock"]

_LOCKS = Path("/proc/locks")
_MAX_NAMED = 4
"""Processes that a message names at most: many may have locked a file for reading."""


@final
class FileLock:
    """The lock of an open file. The kernel releases it when the process that holds it ends."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Locks nothing yet. The caller closes the descriptor."""
        self._descriptor = descriptor
        self._path = path

    def try_acquire(self, *, exclusive: bool) -> bool:
        """Locks the file against writers, and with `exclusive` against readers too. Never waits.

        flock() has no timeout, so whoever waits for the lock tries again and again. It belongs to the open file,
        so it also excludes other stores of this process; POSIX record locks do not. On NFS the kernel implements
        it by record locks.

        Returns whether the file is locked now. Raises StoreError if the file system has no locks.
        """
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(
                f"the store's file {self._path!r} cannot be locked ({error.strerror}): choose a path on a "
                "file system with locks"
            ) from error
        return True

    def release(self) -> None:
        """Unlocks the file."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def describe_holders(self) -> str:
        """Returns which processes have locked the file, and what can be done about them, for messages."""
        holders = list(dict.fromkeys(self._holders()))
        if not holders:
            return "it is locked, by no process that can be seen from here: look on the other hosts that share it"
        shown = ", ".join(map(_describe, holders[:_MAX_NAMED])) + ", …" * (len(holders) > _MAX_NAMED)
        return f"it is locked by {shown}: end what hangs, and continue what is stopped (kill -CONT)"

    def _holders(self) -> Iterator[int]:
        """Yields the processes that hold the lock, this one included."""
        with suppress(OSError):  # without /proc, or when another thread has closed the file
            status = os.fstat(self._descriptor)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            for line in _LOCKS.read_text().splitlines():
                fields = line.split()  # "1: FLOCK ADVISORY WRITE 4711 08:02:1234 0 EOF"; "->" is one that waits
                if len(fields) < 6 or fields[1] not in ("FLOCK", "POSIX", "OFDLCK"):
                    continue
                place, _, inode = fields[5].rpartition(":")
                # Of a file on an overlay, the kernel names a device that stat() does not know.
                if int(inode) == status.st_ino and (place == device or _has_open(int(fields[4]), status)):
                    yield int(fields[4])


def _has_open(process: int, status: os.stat_result) -> bool:
    """Returns whether a process is known to have a file open."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{process}/fd/{descriptor}"), status):
                    return True
    return False


def _describe(process: int) -> str:
    """Returns a process with the name of its program and its state; the state may be of a moment ago."""
    try:
        program, _, rest = Path(f"/proc/{process}/stat").read_text().partition(" (")[2].rpartition(") ")
    except OSError:
        return f"process {process}, which has ended, and whose child has its file still open"
    stopped = ", stopped" if rest[:1] in ("T", "t") else ""
    return f"process {process} ({program}{stopped})"
