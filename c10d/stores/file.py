"""A store in a file."""

import os
import threading
import time
from typing import final

from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout
from .log import OperationLog
from .state import KeyValueState

__all__ = ["FileStore"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks at the file, while waiting


@final
class FileStore(Store):
    """Shared by the processes that open the same file, on one host or on a file system with locks.

    Every process replays the file's log into its own memory, so the file grows with each change. The last
    user's close removes it, but not before `world_size` users (if that is given) have come and gone. A user
    that was killed never leaves, so the file stays: remove it before its path is used again.
    """

    def __init__(self, file_name: str, world_size: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Opens the file, creating it if need be.

        Args:
            file_name: its path.
            world_size: how many users must have left before the file is removed; -1 for any number.
            timeout: how long waiting operations wait.

        Raises:
            StoreError: the file cannot be opened, or it is something else than a store.
        """
        self._path = os.path.abspath(os.fspath(file_name))
        self._world_size = world_size
        self._guard = threading.Lock()
        self._state = KeyValueState()
        self._log = self._join()
        super().__init__(timeout)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._path

    def clone(self) -> "FileStore":
        """Another user of the same file."""
        return FileStore(self._path, self._world_size, timeout=self.timeout)

    def _join(self) -> OperationLog:
        while True:
            log = OperationLog(self._path)
            try:
                with log.lock(exclusive=True):
                    # Between opening and locking, the last user may have removed it.
                    if log.is_current():
                        self._change(log, Operation(kind=store_pb2.JOIN))
                        return log
            except BaseException:
                log.close()
                raise
            log.close()

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while True:
            with self._guard:
                if self._closed:
                    raise self._closed_error()
                if self._log.has_more():
                    with self._log.lock(exclusive=False):
                        self._replay(self._log)
                if not self._state.missing(operation):
                    outcome = self._apply(operation)
                    if not outcome.missing:
                        return outcome
                missing = self._state.missing(operation)
            if (left := deadline - time.monotonic()) <= 0:
                return Outcome(missing=missing)
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _apply(self, operation: Operation) -> Outcome:
        if operation.kind in _READING:
            return self._state.apply(operation)
        with self._log.lock(exclusive=True):
            return self._change(self._log, operation)

    def _change(self, log: OperationLog, operation: Operation) -> Outcome:
        """Runs an operation on the newest state; logs it if it changes that. Needs the exclusive lock."""
        self._replay(log)
        version = self._state.version
        outcome = self._state.apply(operation)
        if self._state.version != version:
            try:
                log.append(operation)
            except BaseException:
                # It did not happen. The state in memory says otherwise, so it is read again.
                self._state = KeyValueState()
                log.rewind()
                raise
        return outcome

    def _replay(self, log: OperationLog) -> None:
        for operation in log.read():
            self._state.apply(operation)

    def _release(self) -> None:
        with self._guard:
            try:
                with self._log.lock(exclusive=True):
                    users = self._change(self._log, Operation(kind=store_pb2.LEAVE)).number
                    if users == 0 and self._state.left >= self._world_size and self._log.is_current():
                        self._log.remove()
            finally:
                self._log.close()


_READING = frozenset(
    {
        store_pb2.GET,
        store_pb2.WAIT,
        store_pb2.CHECK,
        store_pb2.COUNT_KEYS,
        store_pb2.LIST_KEYS,
        store_pb2.QUEUE_LENGTH,
    }
)
