"""A store in a file."""

import os
import threading
import time
from collections.abc import Sequence
from typing import final

from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from .log import OperationLog
from .state import KeyValueState

__all__ = ["FileStore"]

_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 0.001, 0.02
"""Seconds between two reads of the file while waiting, doubled from the first to the second."""

_READ_ONLY = frozenset(
    {
        store_pb2.GET,
        store_pb2.WAIT,
        store_pb2.CHECK,
        store_pb2.COUNT_KEYS,
        store_pb2.LIST_KEYS,
        store_pb2.QUEUE_LENGTH,
    }
)


@final
class FileStore(Store):
    """A store that processes share by opening the same file, on one host or on a shared file system with locks.

    The file is a log of the changes, which every process replays into its own memory; it grows with each change.
    The last user that closes the store removes the file, but not before `world_size` users (if given) have closed
    it. A user that was killed never closes it, so the file stays: remove it before using its path again.
    """

    def __init__(self, file_name: str, world_size: int = -1, *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Opens the file, and creates it if it does not exist.

        Args:
            file_name: path of the file.
            world_size: number of users that must have closed the store before the file is removed; -1 for any
                number.
            timeout: default timeout of operations that wait for keys.

        Raises:
            StoreError: the file cannot be opened, or is not a store.
        """
        seconds = to_seconds(timeout)
        self._replica = _Replica(os.path.abspath(os.fspath(file_name)), world_size)
        super().__init__(seconds)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._replica.log.path

    def keep_file_until(self, keys: Sequence[str]) -> None:
        """Keeps the last user of this process from removing the file, unless all of these keys exist by then."""
        self._replica.required_keys = tuple(keys)

    def clone(self) -> "FileStore":
        """Opens another FileStore on the same file. The two count as one user."""
        twin = FileStore.__new__(FileStore)
        twin._replica = self._replica.add_store()
        Store.__init__(twin, self.timeout)
        return twin

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        deadline = time.monotonic() + seconds
        interval = _MIN_POLL_INTERVAL_S
        while True:
            with self._replica.lock:
                if self._closed:
                    raise self._closed_error()
                outcome = self._replica.execute(operation)
            remaining = deadline - time.monotonic()
            if not outcome.missing or remaining <= 0:
                return outcome
            time.sleep(min(interval, remaining))
            interval = min(2 * interval, _MAX_POLL_INTERVAL_S)

    def _release(self) -> None:
        self._replica.remove_store()


@final
class _Replica:
    """This process's copy of the keys in the file, shared by a FileStore and its clones.

    lock: held by the caller of `execute`.
    required_keys: the file is not removed unless all of these exist.
    """

    def __init__(self, path: str, world_size: int) -> None:
        self.lock = threading.Lock()
        self._world_size = world_size
        self._store_count = 1
        self.required_keys: tuple[str, ...] = ()
        self._state = KeyValueState()
        self.log = self._join(path)

    def add_store(self) -> "_Replica":
        """Counts one more store that uses this replica, and returns the replica."""
        with self.lock:
            self._store_count += 1
        return self

    def remove_store(self) -> None:
        """Ends the use by one store. The last of this process closes the file; the last of all removes it."""
        with self.lock:
            self._store_count -= 1
            if self._store_count:
                return
            try:
                with self.log.lock(exclusive=True):
                    users = self._change(self.log, Operation(kind=store_pb2.LEAVE)).number
                    all_left = users == 0 and self._state.left >= self._world_size
                    if all_left and self._has(self.required_keys) and self.log.is_current():
                        self.log.remove()
            finally:
                self.log.close()

    def execute(self, operation: Operation) -> Outcome:
        """Runs an operation without waiting. Keys that it would have to wait for are `missing` in the outcome."""
        if operation.kind in _READ_ONLY:
            if self.log.has_more():
                with self.log.lock(exclusive=False):
                    self._replay(self.log)
            return self._state.apply(operation)
        if self._state.missing(operation) and not self.log.has_more():
            return self._state.apply(operation)  # a queue still has no item; no lock is needed to see that
        with self.log.lock(exclusive=True):
            return self._change(self.log, operation)

    def _has(self, keys: Sequence[str]) -> bool:
        return bool(self._state.apply(Operation(kind=store_pb2.CHECK, keys=keys)).number)

    def _join(self, path: str) -> OperationLog:
        """Opens the file, and logs in it that this process uses it."""
        while True:
            log = OperationLog(path)
            try:
                with log.lock(exclusive=True):
                    # The last user may have removed the file between opening and locking.
                    if log.is_current():
                        self._change(log, Operation(kind=store_pb2.JOIN))
                        return log
            except BaseException:
                log.close()
                raise
            log.close()

    def _change(self, log: OperationLog, operation: Operation) -> Outcome:
        """Runs an operation on the latest state, and logs it if it changes the state. Needs the exclusive lock."""
        self._replay(log)
        version = self._state.version
        outcome = self._state.apply(operation)
        if self._state.version != version:
            try:
                log.append(operation)
            except BaseException:
                # Undo the change in memory, which is not in the file: replay the file from its start.
                self._state = KeyValueState()
                log.rewind()
                raise
        return outcome

    def _replay(self, log: OperationLog) -> None:
        for operation in log.read():
            self._state.apply(operation)
