"""A store in the memory of one process."""

import threading
import time
from typing import final

from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout
from .state import ADDING, KeyValueState

__all__ = ["HashStore"]


@final
class HashStore(Store):
    """A store that the threads of one process share."""

    def __init__(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._state, self._changed = KeyValueState(), threading.Condition()
        super().__init__(timeout)

    def clone(self) -> "HashStore":
        """Opens another HashStore on the same keys."""
        twin = HashStore(self.timeout)
        twin._state, twin._changed = self._state, self._changed
        return twin

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._state.missing(operation):
                if self._closed:
                    raise self._closed_error()
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(remaining)
            outcome = self._state.apply(operation)
            if operation.kind in ADDING:
                self._changed.notify_all()
            return outcome

    def _release(self) -> None:
        with self._changed:
            self._changed.notify_all()
