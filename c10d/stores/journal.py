"""The log of a store that can be started again: its changes, and what it has to know of its clients.

The file is an OperationLog. A change is appended before it is answered, so it survives the process; with `sync`,
it is on the disk by then, and survives the host too. When the file has grown enough, another one takes its place
that has the present state only.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from typing import final

from ...errors import StoreError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation
from .log import STORE_PROCESS, OperationLog

__all__ = ["Journal"]

ID_BYTES = 16

MIN_GROWTH_BYTES = 16 << 20
"""Bytes by which the file grows at least before it is rewritten; else it has to double."""

log = logging.getLogger(__name__)


@final
class Journal:
    """The file. One thread at a time may use it."""

    def __init__(self, path: str, *, sync: bool = False) -> None:
        """Opens the file, and makes it if it does not exist. No other process can use it until it is closed.

        Raises StoreError if the file cannot be used, is of another version or kind, or is damaged.
        """
        self._path = os.path.abspath(path)
        self._sync = sync
        self._log = self._open(self._path)
        self.identity = b""
        """Which store it is: random bytes that it keeps."""
        try:
            first = next(self.read(), None)
            if first is None:
                first = Operation(kind=store_pb2.IDENTIFY, values=[secrets.token_bytes(ID_BYTES)])
                self._log.append(first)
                self._log.sync()
            if first.kind != store_pb2.IDENTIFY:
                raise StoreError(f"the store's file {path!r} does not begin with the identity of a store")
        except BaseException:
            self.close()
            raise
        self.identity = first.values[0]
        self._rewritten_bytes = self._log.size

    def read(self) -> Iterator[Operation]:
        """Yields all records, the identity first. Raises StoreError if the file is damaged."""
        self._log.rewind()
        yield from self._log.read()

    def append(self, change: Operation) -> None:
        """Appends a change. Raises StoreError, and leaves the file unchanged, if it cannot be written."""
        self._log.append(change)

    def take_back(self) -> None:
        """Takes the change back that was appended last."""
        self._log.take_back()

    def commit(self) -> None:
        """With `sync`, waits until the last change is on the disk; if that fails, takes it back and raises."""
        if self._sync:
            try:
                self._log.sync()
            except StoreError:
                self.take_back()
                raise

    @property
    def is_large(self) -> bool:
        """Whether the file is to be rewritten."""
        return self._log.size > self._rewritten_bytes + max(MIN_GROWTH_BYTES, self._rewritten_bytes)

    def rewrite(self, changes: Iterable[Operation]) -> None:
        """Puts a file that has these changes only in the place of this one; keeps this one if that fails."""
        self._rewritten_bytes = self._log.size  # when it has doubled, this is tried again
        path = self._path + ".new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a process that was killed here
            made = self._open(path)
            try:
                made.append(Operation(kind=store_pb2.IDENTIFY, values=[self.identity]))
                for change in changes:
                    made.append(change)
                made.sync()
                made.replace(self._path)
            except BaseException:
                made.close()
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        except (StoreError, OSError) as error:
            log.warning("the log of the store cannot be rewritten, so it grows: %s", error)
            return
        self._log.close()
        self._log = made
        self._rewritten_bytes = made.size

    def close(self) -> None:
        """Closes the file."""
        self._log.close()

    def _open(self, path: str) -> OperationLog:
        opened = OperationLog(path, STORE_PROCESS)
        try:
            if not opened.lock.try_acquire(exclusive=True):
                raise StoreError(
                    f"the store's file {path!r} is used by another process: {opened.lock.describe_holders()}"
                )
        except BaseException:
            opened.close()
            raise
        return opened
