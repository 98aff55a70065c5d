"""The file under a FileStore: a log of operations that any process can replay."""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from google.protobuf.message import DecodeError

from ...errors import StoreError
from ...proto.v1.store_pb2 import Operation
from .base import MAX_BYTES

__all__ = ["OperationLog"]

_MAGIC = b"gradwire store 1\n"
_LONGEST = MAX_BYTES + 4096  # a record has a few bytes beside the keys and values that MAX_BYTES bounds
_HEADER = struct.Struct("<II")  # length and CRC-32 of the serialized operation that follows


@final
class OperationLog:
    """An append-only file of operations, with a lock that excludes other processes and other OperationLogs.

    One thread at a time uses it. A record that its writer, killed, did not finish counts for nothing: readers
    stop before it, and the next append overwrites it.
    """

    def __init__(self, path: str) -> None:
        """Opens the file, creating it if need be.

        Raises:
            StoreError: it cannot be opened, or it is something else than a store.
        """
        self.path = path
        try:
            # 0600: what is in a store decides which code runs.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(f"the store's file {path!r} cannot be opened: {error.strerror}") from error
        self._read_to = 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    @contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """Keeps writers out (and with `exclusive`, readers)."""
        # flock belongs to the open file, so it also excludes other stores of this process, which POSIX record
        # locks do not. On NFS the kernel turns it into a record lock.
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

    def is_current(self) -> bool:
        """Is this still the file of that path? It is not after its last user has removed it."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._file))

    def remove(self) -> None:
        """Takes the file out of its folder."""
        os.unlink(self.path)

    def has_more(self) -> bool:
        """Is there anything after what was read? Needs no lock."""
        return os.fstat(self._file).st_size > self._read_to

    def rewind(self) -> None:
        """Makes the next `read` begin with the first record."""
        self._read_to = 0

    def read(self) -> Iterator[Operation]:
        """The records after those already read. Needs the lock.

        Raises:
            StoreError: the file is no store, or damaged.
        """
        if self._read_to == 0:
            start = os.pread(self._file, len(_MAGIC), 0)
            if not _MAGIC.startswith(start):
                raise StoreError(f"{self.path!r} is not a gradwire store: remove it, or choose another path")
            if start != _MAGIC:
                return  # new, or its first writer was killed at once
            self._read_to = len(_MAGIC)
        while True:
            header = self._read(_HEADER.size, self._read_to)
            if len(header) < _HEADER.size:
                return
            length, checksum = _HEADER.unpack(header)
            if length > _LONGEST:
                raise self._damaged()
            end = self._read_to + _HEADER.size + length
            size = os.fstat(self._file).st_size
            if end > size:
                return
            body = self._read(length, self._read_to + _HEADER.size)
            if zlib.crc32(body) != checksum:
                if end == size:
                    return
                raise self._damaged()
            try:
                operation = Operation.FromString(body)
            except DecodeError as error:
                raise self._damaged() from error
            self._read_to = end
            yield operation

    def append(self, operation: Operation) -> None:
        """Writes one record behind those read, which must be all. Needs the exclusive lock.

        Raises:
            StoreError: it could not be written, and is not there.
        """
        body = operation.SerializeToString()
        record = _HEADER.pack(len(body), zlib.crc32(body)) + body
        if self._read_to == 0:
            record = _MAGIC + record
        try:
            if self.has_more():
                os.ftruncate(self._file, self._read_to)  # an unfinished record
            self._write(record)
        except OSError as error:
            os.ftruncate(self._file, self._read_to)
            raise StoreError(f"the store's file {self.path!r} cannot be written: {error.strerror}") from error
        self._read_to += len(record)

    def _read(self, length: int, offset: int) -> bytes:
        parts = []
        while length and (part := os.pread(self._file, length, offset)):
            parts.append(part)
            length -= len(part)
            offset += len(part)
        return b"".join(parts)

    def _write(self, record: bytes) -> None:
        rest, offset = memoryview(record), self._read_to
        while rest:
            count = os.pwrite(self._file, rest, offset)
            rest, offset = rest[count:], offset + count

    def _damaged(self) -> StoreError:
        return StoreError(
            f"the store's file {self.path!r} is damaged at byte {self._read_to}: remove it and start all its "
            "users again"
        )
