"""The base class of stores that are views of other stores."""

import threading
from typing import Any, Self, cast

from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchStore
from .base import Store
from .torch_store import execute

__all__ = ["StoreView"]


class StoreView(Store):
    """A view of another store, gradwire's or not. Closing it leaves the underlying store open."""

    def __init__(self, store: TorchStore) -> None:
        self._store = cast(Any, store)  # torch's stubs lack timeout, clone and has_extended_api
        self._own_clone: Store | None = None
        self._closed_event = threading.Event()
        super().__init__(self._store.timeout, parent=store if isinstance(store, Store) else None)

    def _over(self, store: TorchStore) -> Self:
        """Makes the same view of another store. To be defined by subclasses."""
        raise NotImplementedError

    @property
    def underlying_store(self) -> TorchStore:
        """The store that this is a view of."""
        return cast(TorchStore, self._store)

    def has_extended_api(self) -> bool:
        """Returns whether the underlying store supports append, multi_get and multi_set."""
        return bool(self._store.has_extended_api())

    def clone(self) -> Self:
        """Makes the same view of a clone of the underlying store; both are closed together."""
        under = self._store.clone()
        twin = self._over(under)
        twin.set_timeout(self.timeout)
        twin.credentials, twin.insecure = self.credentials, self.insecure
        twin._own_clone = under if isinstance(under, Store) else None
        return twin

    def _release(self) -> None:
        self._closed_event.set()
        if self._own_clone is not None:
            self._own_clone.close()

    def _execute_below(self, operation: Operation, seconds: float = 0.0) -> Outcome:
        """Runs an operation in the underlying store."""
        if isinstance(self._store, Store):
            self._store._check_usable()
            return self._store._execute(operation, seconds)
        return execute(self._store, operation, seconds, self._closed_event)
