"""The file of a FileStore, or of a store that can be started again: a log of operations, which are replayed.

A record is a header, a serialized operation, and a byte that is not zero. The header has the length and the
checksum of the operation, and a checksum of these two and of the header before. So a header is believed only at
its place, after the record that it was written after.

What a writer has written when it, or its host, is killed is the beginning of a record, perhaps with zeros after
it. Only that counts as unfinished: it has not been answered, and the next writer overwrites it. Everything else
that is no record is damage, and refused: what is behind it has been answered.

Processes that share the file lock it. A lock says which processes hold it.
"""

import errno
import fcntl
import logging
import os
import re
import shlex
import stat
import struct
import weakref
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, final

from google.protobuf.message import DecodeError

from ...errors import StoreError
from ...net.inheritance import at_fork
from ...proto.v1.store_pb2 import Operation
from .limits import MAX_BYTES, parse_operation

__all__ = ["FILE_STORE", "STORE_PROCESS", "OperationLog"]

FILE_STORE: Final = b"gradwire store 2\n"

STORE_PROCESS: Final = b"gradwire store log 2\n"
"""How files begin: what they are, and the version of their format."""

_KINDS: Final = {b"store": "the file of a FileStore", b"store log": "the log of a store process (gradwire store)"}

_BEGINNING: Final = re.compile(rb"gradwire (store|store log) ([0-9]{1,9})\n")

_MAX_BEGINNING_BYTES: Final = 64

_MAX_RECORD_BYTES: Final = MAX_BYTES + 8192
"""Bytes of an operation at most: of a request, which has up to MAX_BYTES + 4096, and what a store adds to it."""

_CHECKED: Final = struct.Struct("<II")
"""The length and the CRC-32 of the serialized operation that follows the header."""

_CHECKSUM: Final = struct.Struct("<I")
"""The rest of the header: the CRC-32 of that, begun with the one of the header before; in the first record, with
the CRC-32 of the beginning of the file."""

_HEADER_BYTES: Final = _CHECKED.size + _CHECKSUM.size

_END_MARK: Final = b"\n"
"""The last byte of a record. It is not zero, so a record that ends with zeros is known to be unfinished."""

_CUT: Final = "it has been cut while this process used it"

_BLOCK_BYTES: Final = 1 << 16

_LOCKS = Path("/proc/locks")

_MAX_NAMED = 4
"""Processes that a message names at most: many may have locked a file for reading."""

log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """A place in a log: bytes and records before it, and the checksum of the header before."""

    position: int
    records: int
    checksum: int


_START: Final = _Place(0, 0, 0)

_open_logs: "weakref.WeakSet[OperationLog]" = weakref.WeakSet()


@final
class OperationLog:
    """An append-only file of operations, with a lock that excludes other processes and other OperationLogs.

    One thread at a time may use it. The kernel releases the lock when the process that holds it ends.
    """

    def __init__(self, path: str, kind: bytes = FILE_STORE) -> None:
        """Opens the file, and creates it if it does not exist.

        Raises StoreError if it cannot be opened, is a symbolic link, or belongs to another user.
        """
        self.path = path
        self._beginning = kind
        try:
            # 0600: whoever can write to a store can run code on the workers.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise StoreError(f"the store's file {path!r} cannot be opened: {reason}") from error
        _open_logs.add(self)
        try:
            self._check_owner()
        except BaseException:
            self.close()
            raise
        self._end = _START
        """After the last record that has been read or appended."""
        self._before = _START
        """Before the record that was appended last."""

    def _check_owner(self) -> None:
        """Raises StoreError for what another user may have put there."""
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"the store's file {self.path!r} is not a regular file: choose another path")
        if status.st_uid != os.geteuid():
            raise StoreError(
                f"the store's file {self.path!r} belongs to user {status.st_uid}, and this process to user "
                f"{os.geteuid()}: choose a path in a folder that only you can write to"
            )

    def close(self) -> None:
        """Closes the file."""
        _open_logs.discard(self)
        os.close(self._file)

    def try_lock(self, *, exclusive: bool) -> bool:
        """Locks the file against writers, and with `exclusive` against readers too. Never waits.

        flock() has no timeout, so whoever waits for the lock tries again and again. It belongs to the open file,
        so it also excludes other stores of this process; POSIX record locks do not. On NFS the kernel implements
        it by record locks.

        Returns whether the file is locked now. Raises StoreError if the file system has no locks.
        """
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(
                f"the store's file {self.path!r} cannot be locked ({error.strerror}): choose a path on a "
                "file system with locks"
            ) from error
        return True

    def unlock(self) -> None:
        """Unlocks the file."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def describe_lock_holders(self) -> str:
        """Returns which processes have locked the file, and what can be done about them, for messages."""
        holders = list(dict.fromkeys(self._lock_holders()))
        if not holders:
            return "it is locked, by no process that can be seen from here: look on the other hosts that share it"
        shown = ", ".join(map(_describe, holders[:_MAX_NAMED])) + ", …" * (len(holders) > _MAX_NAMED)
        return f"it is locked by {shown}: end what hangs, and continue what is stopped (kill -CONT)"

    def _lock_holders(self) -> Iterator[int]:
        """Yields the processes that hold the lock, this one included."""
        with suppress(OSError):  # without /proc, or when another thread has closed the file
            status = os.fstat(self._file)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            for line in _LOCKS.read_text().splitlines():
                fields = line.split()  # "1: FLOCK ADVISORY WRITE 4711 08:02:1234 0 EOF"; "->" is one that waits
                if len(fields) < 6 or fields[1] not in ("FLOCK", "POSIX", "OFDLCK"):
                    continue
                place, _, inode = fields[5].rpartition(":")
                # Of a file on an overlay, the kernel names a device that stat() does not know.
                if int(inode) == status.st_ino and (place == device or _has_open(int(fields[4]), status)):
                    yield int(fields[4])

    @property
    def size(self) -> int:
        """Bytes of the records that have been read or appended."""
        return self._end.position

    def sync(self) -> None:
        """Waits until the file is on the disk. Raises StoreError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise StoreError(f"the store's file {self.path!r} cannot be written: {error.strerror}") from error

    def replace(self, path: str) -> None:
        """Gives the file another path, in the same folder, in place of the file that is there."""
        os.replace(self.path, path)
        self.path = path
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def is_current(self) -> bool:
        """Returns whether the path still leads to this file, which its last user may have removed."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._file))

    def has_more(self) -> bool:
        """Returns whether the file has something else than what was read so far. Needs no lock."""
        return os.fstat(self._file).st_size != self._end.position

    def rewind(self) -> None:
        """Makes the next `read` start with the first record."""
        self._end = self._before = _START

    def read(self) -> Iterator[Operation]:
        """Yields the operations after those read so far, without one that is unfinished. Needs the lock."""
        size = os.fstat(self._file).st_size
        if size < self._end.position:
            raise self._damaged(_CUT)
        if self._end == _START and not self._read_beginning():
            return
        while (record := self._read_record(size)) is not None:
            operation, self._end = record
            yield operation

    def _read_beginning(self) -> bool:
        """Reads the beginning of the file; returns whether it is there: the file may be new."""
        start = self._read(_MAX_BEGINNING_BYTES, 0)
        if start.startswith(self._beginning):
            self._end = _Place(len(self._beginning), 0, zlib.crc32(self._beginning))
            return True
        if self._beginning.startswith(start):
            return False  # new, or its first writer was killed at once
        wanted, found = _BEGINNING.match(self._beginning), _BEGINNING.match(start)
        if wanted and found:
            kind = _KINDS[found[1]]
            if found[1] != wanted[1]:
                raise StoreError(f"{self.path!r} is {kind}, not {_KINDS[wanted[1]]}: choose another path")
            raise StoreError(
                f"{self.path!r} is {kind} in version {int(found[2])} of its format, and this gradwire has version "
                f"{int(wanted[2])}: go on with the gradwire that has written it, or choose another path"
            )
        raise StoreError(
            f"{self.path!r} is not a gradwire store: remove it, or choose another path; or it is one whose first "
            f"{len(self._beginning)} bytes are damaged, which should be {self._beginning!r} and begin with "
            f"{start[: len(self._beginning)]!r}"
        )

    def _read_record(self, size: int) -> tuple[Operation, _Place] | None:
        """Returns the next record, and the place after it; None if there is none, or one that is unfinished."""
        position, records, checksum = self._end
        header = self._read(_HEADER_BYTES, position)
        if len(header) < _HEADER_BYTES:
            return None
        length, body_checksum = _CHECKED.unpack_from(header)
        (header_checksum,) = _CHECKSUM.unpack_from(header, _CHECKED.size)
        if zlib.crc32(header[: _CHECKED.size], checksum) != header_checksum:
            if self._written_size(size) <= position + _HEADER_BYTES:
                return None
            raise self._damaged("its header is not the one that was written after the record before")
        if length > _MAX_RECORD_BYTES:
            raise self._damaged(f"it has {length} bytes, more than the limit of {_MAX_RECORD_BYTES}")
        end = position + _HEADER_BYTES + length + len(_END_MARK)
        if end > size:
            return None
        body = self._read(length, position + _HEADER_BYTES)
        if zlib.crc32(body) != body_checksum:
            if self._written_size(size) < end:
                return None
            raise self._damaged("its operation has another checksum")
        try:
            operation = parse_operation(body)
        except DecodeError as error:
            raise self._damaged(f"its operation cannot be read: {error}") from error
        return operation, _Place(end, records + 1, header_checksum)

    def append(self, operation: Operation) -> None:
        """Appends an operation. Needs the exclusive lock, and all records must have been read.

        Raises StoreError if it could not be written; the file is unchanged then.
        """
        body = operation.SerializeToString()
        position, records, checksum = self._end
        checked = _CHECKED.pack(len(body), zlib.crc32(body))
        start = b""
        if self._end == _START:
            start, checksum = self._beginning, zlib.crc32(self._beginning)
        checksum = zlib.crc32(checked, checksum)
        record = b"".join((start, checked, _CHECKSUM.pack(checksum), body, _END_MARK))
        try:
            unfinished = os.fstat(self._file).st_size - position
            if unfinished < 0:
                raise self._damaged(_CUT)
            if unfinished:
                log.warning(
                    "the last %d bytes of the store's file %r are a change that was not finished, because its "
                    "writer was killed: they are dropped",
                    unfinished,
                    self.path,
                )
                os.ftruncate(self._file, position)
            self._write(record)
        except OSError as error:
            os.ftruncate(self._file, position)
            raise StoreError(f"the store's file {self.path!r} cannot be written: {error.strerror}") from error
        self._before, self._end = self._end, _Place(position + len(record), records + 1, checksum)

    def take_back(self) -> None:
        """Takes back the record that was appended last, just before. Needs the exclusive lock."""
        os.ftruncate(self._file, self._before.position)
        self._end = self._before

    def _read(self, length: int, offset: int) -> bytes:
        parts = []
        while length and (part := os.pread(self._file, length, offset)):
            parts.append(part)
            length -= len(part)
            offset += len(part)
        return b"".join(parts)

    def _write(self, record: bytes) -> None:
        rest, offset = memoryview(record), self._end.position
        while rest:
            count = os.pwrite(self._file, rest, offset)
            rest, offset = rest[count:], offset + count

    def _written_size(self, size: int) -> int:
        """Returns the size without zeros at the end of the file, which a host that failed has left there."""
        end = size
        while end > self._end.position:
            start = max(self._end.position, end - _BLOCK_BYTES)
            if block := self._read(end - start, start).rstrip(b"\0"):
                return start + len(block)
            end = start
        return end

    def _damaged(self, what: str) -> StoreError:
        position, records, _ = self._end
        kept = (
            f"or keep the {records} changes before it, and lose those behind it, with "
            f"`truncate --size={position} {shlex.quote(self.path)}`; "
        ) * (records > 0)
        return StoreError(
            f"the store's file {self.path!r} is damaged at byte {position}, in record {records + 1}: {what}. End "
            f"all processes that use it, and put a copy in its place, if there is one; {kept}or remove it, and "
            "start anew"
        )


def _close_inherited() -> None:
    """Closes the files of the parent in a forked process, which cannot use them, and would keep them locked."""
    for each in list(_open_logs):
        each.close()


at_fork(in_child=_close_inherited)


def _has_open(process: int, status: os.stat_result) -> bool:
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
