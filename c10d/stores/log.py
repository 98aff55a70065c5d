"""The file of a FileStore, or of a store that can be started again: a log of operations, which are replayed."""

import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from google.protobuf.message import DecodeError

from ...errors import StoreError
from ...proto.v1.store_pb2 import Operation
from .limits import MAX_BYTES
from .parsing import parse_operation

__all__ = ["FILE_STORE", "STORE_PROCESS", "OperationLog"]

FILE_STORE = b"gradwire store 1\n"
STORE_PROCESS = b"gradwire store log 1\n"
"""How files begin."""

_MAX_RECORD_BYTES = MAX_BYTES + 8192
"""Bytes of a record at most: of a request, which has up to MAX_BYTES + 4096, and of what a store adds to it."""

_HEADER = struct.Struct("<II")  # length and CRC-32 of the serialized operation that follows


@final
class OperationLog:
    """An append-only file of operations, with a lock that excludes other processes and other OperationLogs.

    One thread at a time may use it. If a writer is killed, its unfinished record is ignored: readers stop before
    it, and the next append overwrites it.
    """

    def __init__(self, path: str, kind: bytes = FILE_STORE) -> None:
        """Opens the file, and creates it if it does not exist.

        Args:
            path: of the file.
            kind: FILE_STORE or STORE_PROCESS.

        Raises:
            StoreError: it cannot be opened, is a symbolic link, or belongs to another user.
        """
        self.path = path
        self._magic = kind
        try:
            # 0600: whoever can write to a store can run code on the workers.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise StoreError(f"the store's file {path!r} cannot be opened: {reason}") from error
        try:
            self._check_owner()
        except BaseException:
            self.close()
            raise
        self._position = 0  # bytes read so far

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
        os.close(self._file)

    @contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """Locks the file against writers, and with `exclusive` against readers too, for a `with` block."""
        # flock belongs to the open file, so it also excludes other stores of this process; POSIX record locks do
        # not. On NFS the kernel implements it by record locks.
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        except OSError as error:
            raise StoreError(
                f"the store's file {self.path!r} cannot be locked ({error.strerror}): choose a path on a "
                "file system with locks"
            ) from error
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def acquire(self) -> bool:
        """Locks the file until it is closed; returns whether no other process has locked it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise StoreError(f"the store's file {self.path!r} cannot be locked: {error.strerror}") from error
        return True

    @property
    def size(self) -> int:
        """Bytes of the records that have been read or appended."""
        return self._position

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

    def remove(self) -> None:
        """Removes the file."""
        os.unlink(self.path)

    def has_more(self) -> bool:
        """Returns whether the file has more than was read so far. Needs no lock."""
        return os.fstat(self._file).st_size > self._position

    def rewind(self) -> None:
        """Makes the next `read` start with the first record."""
        self._position = 0

    def read(self) -> Iterator[Operation]:
        """Yields the operations after those read so far. Needs the lock.

        Raises:
            StoreError: the file is not a store, or damaged.
        """
        if self._position == 0:
            start = os.pread(self._file, len(self._magic), 0)
            if not self._magic.startswith(start):
                raise StoreError(f"{self.path!r} is not a gradwire store: remove it, or choose another path")
            if start != self._magic:
                return  # new, or its first writer was killed at once
            self._position = len(self._magic)
        while True:
            header = self._read(_HEADER.size, self._position)
            if len(header) < _HEADER.size:
                return
            length, checksum = _HEADER.unpack(header)
            if length > _MAX_RECORD_BYTES:
                raise self._damaged()
            end = self._position + _HEADER.size + length
            size = os.fstat(self._file).st_size
            if end > size:
                return
            body = self._read(length, self._position + _HEADER.size)
            if zlib.crc32(body) != checksum:
                if end == size:
                    return
                raise self._damaged()
            try:
                operation = parse_operation(body)
            except DecodeError as error:
                raise self._damaged() from error
            self._position = end
            yield operation

    def append(self, operation: Operation) -> None:
        """Appends an operation. Needs the exclusive lock, and all records must have been read.

        Raises:
            StoreError: it could not be written; the file is unchanged.
        """
        body = operation.SerializeToString()
        record = _HEADER.pack(len(body), zlib.crc32(body)) + body
        if self._position == 0:
            record = self._magic + record
        try:
            if self.has_more():
                os.ftruncate(self._file, self._position)  # an unfinished record
            self._write(record)
        except OSError as error:
            os.ftruncate(self._file, self._position)
            raise StoreError(f"the store's file {self.path!r} cannot be written: {error.strerror}") from error
        self._position += len(record)

    def cut(self, size: int) -> None:
        """Takes back the records after the first `size` bytes. Needs the exclusive lock."""
        os.ftruncate(self._file, size)
        self._position = size

    def _read(self, length: int, offset: int) -> bytes:
        parts = []
        while length and (part := os.pread(self._file, length, offset)):
            parts.append(part)
            length -= len(part)
            offset += len(part)
        return b"".join(parts)

    def _write(self, record: bytes) -> None:
        rest, offset = memoryview(record), self._position
        while rest:
            count = os.pwrite(self._file, rest, offset)
            rest, offset = rest[count:], offset + count

    def _damaged(self) -> StoreError:
        return StoreError(
            f"the store's file {self.path!r} is damaged at byte {self._position}: remove it, and restart all "
            "processes that use it"
        )
