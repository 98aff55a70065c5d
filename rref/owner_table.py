"""The values that this worker owns, and the forks of their references on other workers.

An entry is kept as long as any worker has a fork of it; after that, only by the owner's own handles to it.
"""

import contextlib
import threading
import weakref
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, final

from ..errors import RRefError
from ..rpc.execution.kept_errors import copy_error
from .ids import GlobalId

__all__ = ["OwnedValue", "OwnerTable", "ValueTimeoutError"]


class ValueTimeoutError(Exception):
    """A value was not there in time."""


@final
class OwnedValue:
    """The entry of one value: it is pending, set, or failed."""

    __slots__ = ("__weakref__", "forks", "future", "id", "is_created")

    def __init__(self, identifier: GlobalId) -> None:
        self.id = identifier
        self.future: Future[Any] = Future()
        """The value, or the error of the call that makes it."""
        self.is_created = False
        """Whether the creating message has arrived."""
        self.forks: dict[GlobalId, int] = {}
        """The worker that holds each fork."""

    def state(self) -> str:
        """Returns the state in words: `here`, `pending`, or `failed: ` and the class of the error."""
        if not self.future.done():
            return "pending"
        error = self.future.exception()
        return "here" if error is None else f"failed: {type(error).__name__}"

    def resolve(self, value: Any) -> None:
        """Sets the value, unless the entry has failed."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Sets the error that all waiters get instead of the value, unless the value is set."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error.with_traceback(None))  # whose frames refer to this entry

    def wait(self, seconds: float) -> Any:
        """Waits for the value and returns it.

        Args:
            seconds: the timeout, 0 for none.

        Raises:
            ValueTimeoutError: the value was not there in time.
            Exception: the error of the entry.
        """
        wait([self.future], seconds or None)
        if not self.future.done():
            raise ValueTimeoutError
        error = self.future.exception()
        if isinstance(error, Exception):
            raise copy_error(error) from error.__cause__
        return self.future.result()


@final
class OwnerTable:
    """The entries of one worker. Safe to use from any thread."""

    def __init__(self, worker: int) -> None:
        """Args: worker: the id of this worker."""
        self._worker = worker
        self._lock = threading.Lock()
        self._all: weakref.WeakValueDictionary[GlobalId, OwnedValue] = weakref.WeakValueDictionary()
        self._forked: dict[GlobalId, OwnedValue] = {}
        """Entries with forks."""
        self._awaited: dict[GlobalId, OwnedValue] = {}
        """Entries that other workers' messages named before the creating message arrived."""
        self._lost: dict[int, str] = {}
        """The reason of the loss of each lost worker, by id."""

    def __len__(self) -> int:
        """Returns the number of entries with forks."""
        return len(self._forked)

    def awaited_count(self) -> int:
        """Returns the number of entries that wait for their creating message."""
        return len(self._awaited)

    def fork_count(self) -> int:
        """Returns the number of forks of all entries."""
        with self._lock:
            return sum(len(entry.forks) for entry in self._forked.values())

    def create(self, identifier: GlobalId) -> OwnedValue:
        """Returns a new entry that this worker makes by itself."""
        with self._lock:
            entry = self._all[identifier] = OwnedValue(identifier)
            return entry

    def get(self, identifier: GlobalId) -> OwnedValue:
        """Returns an entry; a pending one if the creating message has yet to arrive.

        Raises:
            RRefError: there is no such entry, and none can be created any more.
        """
        with self._lock:
            return self._get(identifier)

    def mark_created(self, entry: OwnedValue) -> None:
        """Notes that the creating message has arrived."""
        with self._lock:
            entry.is_created = True
            self._awaited.pop(entry.id, None)

    def add_fork(self, identifier: GlobalId, fork: GlobalId, holder: int) -> OwnedValue:
        """Counts a fork, and returns the entry.

        Args:
            identifier: the entry.
            fork: the fork.
            holder: the id of the worker that holds the fork.

        Raises:
            RRefError: the holder is lost, or as in `get`.
        """
        with self._lock:
            if holder in self._lost:
                raise RRefError(f"the worker that holds fork {fork} is lost: {self._lost[holder]}")
            entry = self._get(identifier)
            entry.forks[fork] = holder
            self._forked[identifier] = entry
            return entry

    def remove_fork(self, identifier: GlobalId, fork: GlobalId) -> None:
        """Removes a fork. Does nothing if it was removed together with a lost holder."""
        with self._lock:
            entry = self._forked.get(identifier)  # lives to the end of this method: values may have finalizers
            if entry is not None and fork in entry.forks:
                self._remove_fork(entry, fork)

    def fail_awaited(self, identifier: GlobalId, error: RRefError) -> bool:
        """Fails an entry whose creating message will not arrive; returns False if it has arrived by now."""
        with self._lock:
            entry = self._awaited.pop(identifier, None)
            if entry is None:
                return False
            entry.forks.clear()
            self._forked.pop(identifier, None)
        entry.fail(error)
        return True

    def remove_worker(self, worker: int, reason: str) -> None:
        """Removes the forks of a lost worker, and fails the entries that it has yet to create.

        Args:
            worker: its id.
            reason: why it is lost.
        """
        with self._lock:
            self._lost[worker] = reason
            entries = list(self._all.values())
            for identifier in [i for i in self._awaited if i.worker == worker]:
                del self._awaited[identifier]
            for entry in entries:
                for fork in [fork for fork, holder in entry.forks.items() if holder == worker]:
                    self._remove_fork(entry, fork)
        for entry in entries:
            if entry.id.worker == worker and not entry.is_created:
                entry.fail(RRefError(f"reference {entry.id} was never created: its creator is lost ({reason})"))

    def clear(self, error: Exception) -> None:
        """Removes all entries. Those that are pending fail with the error."""
        with self._lock:
            pending = [entry for entry in self._all.values() if not entry.future.done()]
            forked, self._forked = self._forked, {}
            awaited, self._awaited = self._awaited, {}
        forked.clear()  # outside the lock: values may have finalizers
        awaited.clear()
        for entry in pending:
            entry.fail(error)

    def _get(self, identifier: GlobalId) -> OwnedValue:
        entry = self._all.get(identifier)
        if entry is None:
            if identifier.worker == self._worker:
                raise RRefError(f"reference {identifier} is gone: its owner has deleted the value")
            if identifier.worker in self._lost:
                raise RRefError(
                    f"reference {identifier} is gone: its creator is lost ({self._lost[identifier.worker]})"
                )
            entry = self._all[identifier] = self._awaited[identifier] = OwnedValue(identifier)
        return entry

    def _remove_fork(self, entry: OwnedValue, fork: GlobalId) -> None:
        del entry.forks[fork]
        if not entry.forks:
            self._forked.pop(entry.id, None)
