"""A store in a file."""

import os
import threading
import time
from collections.abc import Sequence
from typing import final

from ...errors import StoreError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from .log import OperationLog
from .state import ADDING, KeyValueState

__all__ = ["FileStore"]

_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 0.001, 0.02
"""Seconds between two reads of the file while waiting, doubled from the first to the second."""

_MIN_LOCK_PAUSE_S, _MAX_LOCK_PAUSE_S = 0.0001, 0.005
"""Seconds between two tries to lock the file, doubled from the first to the second."""

_MIN_LOCK_S = 1.0
"""Seconds for which an operation waits at least while others have the file locked, even with a timeout of 0."""

_MAX_CLOSE_S = 10.0
"""Seconds for which `close` waits at most."""

_WAITING = frozenset({store_pb2.GET, store_pb2.WAIT, store_pb2.QUEUE_POP})
"""Operations with a timeout of their own."""

_CHANGING = ADDING | {store_pb2.DELETE, store_pb2.QUEUE_POP}


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
            timeout: how long this constructor and operations wait for other processes that have locked the file,
                and by default for keys.

        Raises:
            StoreError: the file cannot be opened, is not a store, or is damaged; or another process has had it
                locked for all of `timeout`.
        """
        seconds = to_seconds(timeout)
        self._replica = _Replica(os.path.abspath(os.fspath(file_name)), world_size, seconds)
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
        locked = _LockWait(seconds if operation.kind in _WAITING else to_seconds(self.timeout))
        interval = _MIN_POLL_INTERVAL_S
        while True:
            with self._replica.lock:  # not while waiting, since other threads have timeouts of their own
                if self._closed:
                    raise self._closed_error()
                outcome = self._replica.execute(operation)
            if outcome is None:
                locked.pause(self._replica.log)
                continue
            locked.end()
            remaining = deadline - time.monotonic()
            if not outcome.missing or remaining <= 0:
                return outcome
            time.sleep(min(interval, remaining))
            interval = min(2 * interval, _MAX_POLL_INTERVAL_S)

    def _release(self) -> None:
        self._replica.remove_store(min(to_seconds(self.timeout), _MAX_CLOSE_S))


@final
class _LockWait:
    """The waits of an operation for a file that others have locked.

    They end when the operation has to, but last _MIN_LOCK_S at least: an operation that does not wait for keys may
    still have to wait for a moment until another one is done.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self.end()

    def end(self) -> None:
        self._since = 0.0
        self._pause = _MIN_LOCK_PAUSE_S

    def pause(self, log: OperationLog) -> None:
        """Waits until the lock is to be tried again. Raises StoreError, with who has it, when it is too late."""
        now = time.monotonic()
        self._since = self._since or now
        if (left := max(self._deadline, self._since + _MIN_LOCK_S) - now) <= 0:
            raise StoreError(
                f"the store's file {log.path!r} could not be used for {now - self._since:.1f} s: "
                f"{log.describe_lock_holders()}"
            )
        time.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, _MAX_LOCK_PAUSE_S)

    def acquire(self, log: OperationLog) -> None:
        while not log.try_lock(exclusive=True):
            self.pause(log)
        self.end()


@final
class _Replica:
    """This process's copy of the keys in the file, shared by a FileStore and its clones.

    lock: held by the caller of `execute`.
    required_keys: the file is not removed unless all of these exist.
    """

    def __init__(self, path: str, world_size: int, seconds: float) -> None:
        self.lock = threading.Lock()
        self._world_size = world_size
        self._store_count = 1
        self.required_keys: tuple[str, ...] = ()
        self._state = KeyValueState()
        self.log = self._join(path, seconds)

    def add_store(self) -> "_Replica":
        with self.lock:
            self._store_count += 1
        return self

    def remove_store(self, seconds: float) -> None:
        """Ends the use by one store. The last of this process closes the file; the last of all removes it.

        If others have the file locked for `seconds`, it stays.
        """
        with self.lock:
            self._store_count -= 1
            if self._store_count:
                return
            try:
                _LockWait(seconds).acquire(self.log)
                users = self._change(self.log, Operation(kind=store_pb2.LEAVE)).number
                all_left = users == 0 and self._state.left >= self._world_size
                if all_left and self._has(self.required_keys) and self.log.is_current():
                    os.unlink(self.log.path)
            finally:
                self.log.close()  # which releases the lock

    def execute(self, operation: Operation) -> Outcome | None:
        """Runs an operation without waiting. Returns None if others have the file locked; nothing is done then."""
        is_read_only = operation.kind not in _CHANGING
        if (is_read_only or self._state.missing(operation)) and not self.log.has_more():
            return self._state.apply(operation)  # as all have it, or a queue still has no item; it needs no lock
        if not self.log.try_lock(exclusive=not is_read_only):
            return None
        try:
            if is_read_only:
                self._replay(self.log)
                return self._state.apply(operation)
            return self._change(self.log, operation)
        finally:
            self.log.unlock()

    def _has(self, keys: Sequence[str]) -> bool:
        return bool(self._state.apply(Operation(kind=store_pb2.CHECK, keys=keys)).number)

    def _join(self, path: str, seconds: float) -> OperationLog:
        """Opens the file, and logs in it that this process uses it. Waits `seconds` for others that lock it."""
        locked = _LockWait(seconds)
        while True:
            log = OperationLog(path)
            try:
                locked.acquire(log)
                # The last user may have removed the file between opening and locking.
                if log.is_current():
                    self._change(log, Operation(kind=store_pb2.JOIN))
                    log.unlock()
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
                self._start_over(log)  # the change in memory is not in the file
                raise
        return outcome

    def _replay(self, log: OperationLog) -> None:
        """Applies what is new in the file. Needs the lock."""
        try:
            for operation in log.read():
                if problem := self._state.apply(operation).error:  # by a version that knows more operations
                    raise StoreError(
                        f"the store's file {log.path!r} has a change that cannot be replayed: {problem}. Use the "
                        "same version of gradwire in all processes"
                    )
        except BaseException:
            self._start_over(log)  # an interrupt may come between reading a change and applying it
            raise

    def _start_over(self, log: OperationLog) -> None:
        self._state = KeyValueState()
        log.rewind()
