"""The values that this worker owns, and who holds references to them.

An entry is kept while a fork of it lives on any worker; beyond that, only by the owner's own handles to it.
"""

import contextlib
import threading
import weakref
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, final

from ..errors import RRefError
from ..rpc.execution.kept_errors import copy_error
from .ids import GlobalId

__all__ = ["OwnedValue", "OwnerTable", "ValueNotThereError"]


class ValueNotThereError(Exception):
    """A value did not come in time."""


@final
class OwnedValue:
    """One owned value: there already, still being computed, or failed."""

    __slots__ = ("__weakref__", "created", "forks", "future", "id")

    def __init__(self, identifier: GlobalId) -> None:
        self.id = identifier
        self.future: Future[Any] = Future()
        self.created = False
        """Has the message that computes the value come?"""
        self.forks: dict[GlobalId, int] = {}
        """The fork's id, and the worker that holds it."""

    def state(self) -> str:
        """Returns how it stands with the value: `here`, `pending`, or `failed: ` and the class of its error."""
        if not self.future.done():
            return "pending"
        error = self.future.exception()
        return "here" if error is None else f"failed: {type(error).__name__}"

    def resolve(self, value: Any) -> None:
        """Gives the value, unless it has failed."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(value)

    def wait(self, seconds: float) -> Any:
        """The value, or its error raised. Waits for it, at most `seconds`, without limit if 0.

        Raises:
            ValueNotThereError: it has not come.
        """
        wait([self.future], seconds or None)
        if not self.future.done():
            raise ValueNotThereError
        error = self.future.exception()
        if isinstance(error, Exception):
            raise copy_error(error) from error.__cause__
        return self.future.result()

    def fail(self, error: Exception) -> None:
        """Gives the error that everybody who asks for the value gets."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error.with_traceback(None))  # whose frames know this entry


@final
class OwnerTable:
    """The entries of one worker. Safe to use from any thread."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._all: weakref.WeakValueDictionary[GlobalId, OwnedValue] = weakref.WeakValueDictionary()
        self._held: dict[GlobalId, OwnedValue] = {}
        self._awaited: dict[GlobalId, OwnedValue] = {}
        """Those that others ask for before the creating message has come."""
        self._lost: dict[int, str] = {}

    def __len__(self) -> int:
        """How many entries other workers hold references to."""
        return len(self._held)

    def awaited_count(self) -> int:
        """How many entries wait for the message that creates them."""
        return len(self._awaited)

    def fork_count(self) -> int:
        """How many references other workers hold."""
        with self._lock:
            return sum(len(entry.forks) for entry in self._held.values())

    def create(self, identifier: GlobalId) -> OwnedValue:
        """A new entry, made by this worker itself."""
        with self._lock:
            entry = self._all[identifier] = OwnedValue(identifier)
            return entry

    def get(self, identifier: GlobalId) -> OwnedValue:
        """The entry of an id; one without a value yet, if the message that creates it is still on its way.

        Raises:
            RRefError: there is none and none can come.
        """
        with self._lock:
            return self._get(identifier)

    def begin(self, entry: OwnedValue) -> None:
        """The message that computes the value has come."""
        with self._lock:
            entry.created = True
            self._awaited.pop(entry.id, None)

    def add_fork(self, identifier: GlobalId, fork: GlobalId, holder: int) -> OwnedValue:
        """Counts a reference that `holder` has. Raises as `get` does."""
        with self._lock:
            if holder in self._lost:
                raise RRefError(f"the worker that holds fork {fork} is lost: {self._lost[holder]}")
            entry = self._get(identifier)
            entry.forks[fork] = holder
            self._held[identifier] = entry
            return entry

    def remove_fork(self, identifier: GlobalId, fork: GlobalId) -> None:
        """The reference is gone. Does nothing if it was dropped with the worker that held it."""
        with self._lock:
            entry = self._held.get(identifier)  # lives to the end of this method: values may have finalizers
            if entry is not None and fork in entry.forks:
                self._release(entry, fork)

    def give_up(self, identifier: GlobalId, error: RRefError) -> bool:
        """The message that creates an awaited value will not come; False if it has come by now."""
        with self._lock:
            entry = self._awaited.pop(identifier, None)
            if entry is None:
                return False
            entry.forks.clear()
            self._held.pop(identifier, None)
        entry.fail(error)
        return True

    def drop_worker(self, worker: int, reason: str) -> None:
        """A worker is lost, and its references with it."""
        with self._lock:
            self._lost[worker] = reason
            entries = list(self._all.values())
            for identifier in [i for i in self._awaited if i.worker == worker]:
                del self._awaited[identifier]
            for entry in entries:
                for fork in [fork for fork, holder in entry.forks.items() if holder == worker]:
                    self._release(entry, fork)
        for entry in entries:
            if entry.id.worker == worker and not entry.created:
                entry.fail(RRefError(f"reference {entry.id} was never created: its creator is lost ({reason})"))

    def clear(self, error: Exception) -> None:
        """Forgets everything. Who waits for a value gets the error."""
        with self._lock:
            waiting = [entry for entry in self._all.values() if not entry.future.done()]
            held, self._held = self._held, {}
            awaited, self._awaited = self._awaited, {}
        held.clear()  # outside the lock: values may have finalizers
        awaited.clear()
        for entry in waiting:
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

    def _release(self, entry: OwnedValue, fork: GlobalId) -> None:
        del entry.forks[fork]
        if not entry.forks:
            self._held.pop(entry.id, None)
