"""Methods and attributes of a value, through its reference."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import torch

from ..rpc.call_handler import run_function
from ..rpc.calls import send_call
from ..rpc.contracts.agent import current_agent
from ..rpc.execution.futures import Future
from ..rpc.profiling.extension import RPCExecMode
from ..rpc.wait_all import note_future
from .api import remote
from .forks import References
from .ids import GlobalId
from .rref import OwnerHandle, RRef

__all__ = ["RRefProxy", "ask_type", "call_with_values"]

K = TypeVar("K")
"""What a method called through a proxy returns: its result, a future of it, or a reference to it."""

USER_CODE_CALLERS = ("_require_attribute", "_run_method")
"""See gradwire.rpc.wire.tracebacks."""


@final
class RRefProxy(Generic[K]):
    """Has every method of the referenced value; an attribute that is no method is a method that returns it."""

    __slots__ = ("__how", "__rref", "__timeout")

    def __init__(self, rref: RRef[Any], how: str, timeout: float) -> None:
        self.__rref = rref
        self.__how = how
        self.__timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., K]:
        rref, how, timeout = self.__rref, self.__how, self.__timeout

        def call(*args: Any, **kwargs: Any) -> K:
            result: K = _call(rref, how, timeout, (name, args, kwargs))
            return result

        return call


def ask_type(rref: RRef[Any], timeout: float) -> torch.futures.Future[type]:
    """A future of the type of a reference's value."""
    if rref.is_owner():
        known: torch.futures.Future[type] = torch.futures.Future()
        known.set_result(type(rref.local_value()))
        return known
    return _send(rref, _rref_typeof_on_owner, (), timeout)


def call_with_values(rrefs: Sequence[RRef[Any]], function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls `function(values, *args)` on the worker that owns all of some references, which costs no forks.

    Returns:
        A future of its result.
    """
    names, kept = zip(*map(_name_and_hold, rrefs), strict=True)
    return send_call(rrefs[0].owner(), _call_with_values, (names, function, args), keep=kept)


def _call(rref: RRef[Any], how: str, timeout: float, method: tuple[Any, ...]) -> Any:
    if how == "remote":
        # What is not there is known here and now, not when the result is asked for.
        if not hasattr(rref._get_type(timeout), method[0]):
            _send(rref, _require_attribute, method[:1], timeout).wait()
        return remote(rref.owner(), _call_method, (rref, *method), timeout=timeout)
    if how == "rpc_sync":
        return _send(rref, _call_method_by_id, method, timeout, RPCExecMode.SYNC, method[0]).wait()
    future = _send(rref, _call_method_by_id, method, timeout, method=method[0])
    note_future(future)
    return future


def _send(
    rref: RRef[Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    mode: RPCExecMode = RPCExecMode.ASYNC,
    method: str | None = None,
) -> Future[Any]:
    """Calls `function(id of the value, *args)` on the owner."""
    name, keep = _name_and_hold(rref)
    return send_call(rref.owner(), function, (name, *args), timeout=timeout, mode=mode, keep=keep, name=method)


def _name_and_hold(rref: RRef[Any]) -> tuple[tuple[int, ...], object]:
    """The id that a call names a value by, and what must be kept until the call is over."""
    handle = rref._handle
    if isinstance(handle, OwnerHandle):
        return tuple(handle.entry.id), handle.entry
    return tuple(handle.fork.reference), handle.fork.hold


# On the owner.


def _call_method(rref: RRef[Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _run_method(rref.local_value(), name, args, kwargs)


def _call_method_by_id(
    identifier: tuple[int, int], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    return _run_method(_value(identifier), name, args, kwargs)


def _call_with_values(
    identifiers: Sequence[tuple[int, int]], function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    return function([_value(identifier) for identifier in identifiers], *args)


def _run_method(value: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    method = getattr(value, name)
    if not callable(method) and not args and not kwargs:
        return method
    return run_function(method, args, kwargs)


def _rref_typeof_on_owner(identifier: tuple[int, int]) -> type:
    return type(_value(identifier))


def _require_attribute(identifier: tuple[int, int], name: str) -> None:
    getattr(_value(identifier), name)


def _value(identifier: tuple[int, int]) -> Any:
    agent = current_agent()
    entry = agent.extension(References).entry(GlobalId(*identifier))
    with agent.blocking():
        return entry.wait(0)
