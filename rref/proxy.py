"""Methods of a value called through its reference."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from ..rpc.agent import current_agent
from ..rpc.calls import rpc_async, rpc_sync
from .api import remote
from .forks import References
from .ids import GlobalId
from .rref import RRef

__all__ = ["RRefProxy"]


@final
class RRefProxy:
    """Has every method of the referenced value."""

    def __init__(self, rref: RRef[Any], how: str, timeout: float) -> None:
        self._rref = rref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, args, kwargs)

        return call

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        rref, owner = self._rref, self._rref.owner()
        if self._how == "remote":
            return remote(owner, _call_method, (rref, name, args, kwargs), timeout=self._timeout)
        handle = rref._handle
        identifier = tuple(handle.fork.reference if not rref.is_owner() else handle.entry.id)  # type: ignore[union-attr]
        parts = (identifier, name, args, kwargs)
        if self._how == "rpc_sync":
            return rpc_sync(owner, _call_method_by_id, parts, timeout=self._timeout)
        future = rpc_async(owner, _call_method_by_id, parts, timeout=self._timeout)
        # The call names the value by its id only, so it must be kept until the call is over.
        future.add_done_callback(partial(_keep_until_done, rref))
        return future


def _keep_until_done(rref: RRef[Any], future: object) -> None:
    """Does nothing: a future holds its callbacks until it is done."""


def _call_method(rref: RRef[Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return getattr(rref.local_value(), name)(*args, **kwargs)


def _call_method_by_id(
    identifier: tuple[int, int], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    agent = current_agent()
    entry = agent.extension(References).table.get(GlobalId(*identifier))
    with agent.blocking():
        value = entry.wait(0)
    return getattr(value, name)(*args, **kwargs)
