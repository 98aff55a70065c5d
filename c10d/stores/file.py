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

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks at the file, while waiting


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
        seconds = to_seconds(timeout)
        self._replica = _Replica(os.path.abspath(os.fspath(file_name)), world_size)
        super().__init__(seconds)

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._replica.log.path

    def keep_until(self, keys: Sequence[str]) -> None:
        """Has the file stay when this process is the last to leave, unless all of these keys are there by then."""
        self._replica.kept_until = tuple(keys)

    def clone(self) -> "FileStore":
        """Another FileStore on the same file. The two count as one user."""
        twin = FileStore.__new__(FileStore)
        twin._replica = self._replica.share()
        Store.__init__(twin, self.timeout)
        return twin

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        deadline = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while True:
            with self._replica.guard:
                if self._closed:
                    raise self._closed_error()
                outcome = self._replica.execute(operation)
            left = deadline - time.monotonic()
            if not outcome.missing or left <= 0:
                return outcome
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _release(self) -> None:
        self._replica.leave()


@final
class _Replica:
    """This process's copy of what is in the file, and its hold on it. Shared by a FileStore and its clones.

    guard: held while `execute` runs.
    kept_until: keys without which the file is not removed.
    """

    def __init__(self, path: str, world_size: int) -> None:
        self.guard = threading.Lock()
        self._world_size = world_size
        self._sharers = 1
        self.kept_until: tuple[str, ...] = ()
        self._state = KeyValueState()
        self.log = self._join(path)

    def share(self) -> "_Replica":
        """This replica for one more store."""
        with self.guard:
            self._sharers += 1
        return self

    def leave(self) -> None:
        """Ends a store's use. The last of this process leaves the file; the last of all removes it."""
        with self.guard:
            self._sharers -= 1
            if self._sharers:
                return
            try:
                with self.log.lock(exclusive=True):
                    users = self._change(self.log, Operation(kind=store_pb2.LEAVE)).number
                    everybody = users == 0 and self._state.left >= self._world_size
                    if everybody and self._has(self.kept_until) and self.log.is_current():
                        self.log.remove()
            finally:
                self.log.close()

    def execute(self, operation: Operation) -> Outcome:
        """Runs an operation now. If it has to wait for keys, its outcome has them as `missing`."""
        if operation.kind in _READING:
            if self.log.has_more():
                with self.log.lock(exclusive=False):
                    self._replay(self.log)
            return self._state.apply(operation)
        if self._state.missing(operation) and not self.log.has_more():
            return self._state.apply(operation)  # waiting for a queue's item goes on, without any lock
        with self.log.lock(exclusive=True):
            return self._change(self.log, operation)

    def _has(self, keys: Sequence[str]) -> bool:
        return bool(self._state.apply(Operation(kind=store_pb2.CHECK, keys=keys)).number)

    def _join(self, path: str) -> OperationLog:
        while True:
            log = OperationLog(path)
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
