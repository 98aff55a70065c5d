"""A store in the memory of one process."""

import threading
import time
from typing import final

from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout
from .state import KeyValueState, may_satisfy_waiters

__all__ = ["HashStore"]


class _SharedState:
    """The keys of a HashStore and its clones."""

    def __init__(self) -> None:
        self.state = KeyValueState()
        self.changed = threading.Condition()


@final
class HashStore(Store):
    """A store that the threads of one process share."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._shared = _SharedState()
        super().__init__(timeout)

    def clone(self) -> "HashStore":
        """Opens another HashStore on the same keys."""
        twin = HashStore(self.timeout)
        twin._shared = self._shared
        return twin

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        state, changed = self._shared.state, self._shared.changed
        deadline = time.monotonic() + seconds
        with changed:
            while state.missing(operation):
                if self._closed:
                    raise self._closed_error()
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                changed.wait(remaining)
            outcome = state.apply(operation)
            if may_satisfy_waiters(operation):
                changed.notify_all()
            return outcome

    def _release(self) -> None:
        with self._shared.changed:
            self._shared.changed.notify_all()
