"""Methods of a value called through its reference."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

from ..rpc.agent import current_agent
from ..rpc.calls import rpc_async
from .api import remote
from .forks import References
from .ids import GlobalId
from .rref import OwnerHandle, RRef

__all__ = ["RRefProxy"]


@final
class RRefProxy:
    """Has every method of the referenced value."""

    __slots__ = ("__how", "__rref", "__timeout")

    def __init__(self, rref: RRef[Any], how: str, timeout: float) -> None:
        self.__rref = rref
        self.__how = how
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        rref, how, timeout = self.__rref, self.__how, self.__timeout

        def call(*args: Any, **kwargs: Any) -> Any:
            return _call(rref, how, timeout, (name, args, kwargs))

        return call


def _call(rref: RRef[Any], how: str, timeout: float, method: tuple[Any, ...]) -> Any:
    owner = rref.owner()
    if how == "remote":
        return remote(owner, _call_method, (rref, *method), timeout=timeout)
    handle = rref._handle
    identifier = handle.entry.id if isinstance(handle, OwnerHandle) else handle.fork.reference
    future = rpc_async(owner, _call_method_by_id, (tuple(identifier), *method), timeout=timeout)
    if how == "rpc_sync":
        return future.wait()
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
