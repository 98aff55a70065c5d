"""A store whose keys are part of another store's."""

import threading
from typing import Any, cast, final

from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchStore
from .base import Store
from .torch_store import execute

__all__ = ["PrefixStore"]


@final
class PrefixStore(Store):
    """A view of the keys of another store that begin with `prefix/`, under names without it. Views can be nested.

    As in torch, `num_keys` counts the keys of the whole underlying store, while `list_keys` lists only this
    view's. The view has its own timeout, at first that of the underlying store (torch's PrefixStore sets that
    one's instead).

    Closing the view leaves the underlying store open. Operations that wait in an underlying gradwire store go on;
    those that wait in another store fail. Closing a gradwire store also closes the views of it.
    """

    def __init__(self, prefix: str, store: TorchStore) -> None:
        """Makes a view.

        Args:
            prefix: of the keys.
            store: any torch.distributed.Store, gradwire's or not.
        """
        if not isinstance(prefix, str):
            raise TypeError(f"the prefix is {prefix!r}: give a str")
        if not isinstance(store, TorchStore):
            raise TypeError(f"the store is {store!r}: give a torch.distributed.Store, such as a TCPStore")
        self._prefix = f"{prefix}/"
        self._store = cast(Any, store)  # torch's stubs lack timeout, clone and has_extended_api
        self._own_clone: Store | None = None
        self._closed_event = threading.Event()
        super().__init__(self._store.timeout, parent=store if isinstance(store, Store) else None)

    @property
    def underlying_store(self) -> TorchStore:
        """The store that this is a view of."""
        return cast(TorchStore, self._store)

    @property
    def _underlying_non_prefix_store(self) -> TorchStore:
        """The store under all prefixes. The name is torch's."""
        store: Any = self._store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return cast(TorchStore, store)

    def has_extended_api(self) -> bool:
        """Returns whether the underlying store supports append, multi_get and multi_set."""
        return bool(self._store.has_extended_api())

    def clone(self) -> "PrefixStore":
        """Makes a view, with the same prefix, of a clone of the underlying store; both are closed together."""
        under = self._store.clone()
        twin = PrefixStore(self._prefix[:-1], under)
        twin.set_timeout(self.timeout)
        twin.credentials = self.credentials
        twin._own_clone = under if isinstance(under, Store) else None
        return twin

    def _release(self) -> None:
        self._closed_event.set()
        if self._own_clone is not None:
            self._own_clone.close()

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        operation.keys[:] = [self._prefix + key for key in operation.keys]
        if isinstance(self._store, Store):
            self._store._check_usable()
            outcome = self._store._execute(operation, seconds)
        else:
            outcome = execute(self._store, operation, seconds, self._closed_event)
        if outcome.missing:
            outcome.missing[:] = [key.removeprefix(self._prefix) for key in outcome.missing]
        if operation.kind == store_pb2.LIST_KEYS:
            own = [key for key in outcome.keys if key.startswith(self._prefix)]
            outcome.keys[:] = [key.removeprefix(self._prefix) for key in own]
        return outcome
