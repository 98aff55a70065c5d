"""A store whose keys are part of another store's."""

from typing import cast, final

from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..torch_types import TorchStore
from .describe import innermost_store
from .view import StoreView

__all__ = ["PrefixStore"]


@final
class PrefixStore(StoreView):
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
        super().__init__(store)

    def _over(self, store: TorchStore) -> "PrefixStore":
        return PrefixStore(self._prefix[:-1], store)

    @property
    def _underlying_non_prefix_store(self) -> TorchStore:
        """The store under all prefixes. The name is torch's."""
        return cast(TorchStore, innermost_store(self))

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        operation.keys[:] = [self._prefix + key for key in operation.keys]
        outcome = self._execute_below(operation, seconds)
        if outcome.missing:
            outcome.missing[:] = [key.removeprefix(self._prefix) for key in outcome.missing]
        if operation.kind == store_pb2.LIST_KEYS:
            own = [key for key in outcome.keys if key.startswith(self._prefix)]
            outcome.keys[:] = [key.removeprefix(self._prefix) for key in own]
        return outcome
