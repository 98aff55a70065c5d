"""Calls whose results stay on the worker that computes them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, overload

from ..rpc.calls.sending import send_call
from ..rpc.contracts.agent import Destination
from ..rpc.contracts.arguments import UNSET_RPC_TIMEOUT
from ..rpc.execution.futures import Future
from ..rpc.wire.script import not_scriptable
from .ids import name_needed
from .methods import check_agent, create_value, run_with_values
from .rref import RRef

__all__ = ["call_needing", "call_with_values", "remote", "remote_needing"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@overload
def remote(
    to: Destination,
    func: Callable[[*Ts], T],
    args: tuple[*Ts],
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[[], T],
    args: tuple[()] | None = None,
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: list[Any],
    kwargs: None = None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float = ...,
) -> RRef[T]: ...


@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
) -> RRef[T]: ...


@not_scriptable
def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Runs a function on a worker and returns a reference to its result at once.

    Args:
        to: the name, the id or the WorkerInfo of a worker, which may be this one.
        func: a function or class that the other worker can import.
        args: its positional arguments, anything that pickles.
        kwargs: its named arguments.
        timeout: seconds within which the call must end, 0 for no timeout; after that the reference cannot be used.
            By default that of the options.

    Returns:
        A reference. Errors of the call are raised by its `to_here`.

    Raises:
        NotInitializedError: RPC is not initialized.
        UnknownWorkerError: no worker is called so.
        SerializationError: the function or its arguments do not pickle.
        TypeError, ValueError: an argument is of the wrong type, or the timeout is negative.
    """
    return RRef._of(create_value(to, func, args, kwargs, timeout), func)


def call_with_values(rrefs: Sequence[RRef[Any]], function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls `function(values, *args)` on the worker that owns the values of all references. Makes no forks."""
    handles = [rref._handle for rref in rrefs]
    for handle in handles:
        check_agent(handle)
    identifiers, kept = [handle.id for handle in handles], [handle.keep_alive for handle in handles]
    call, owner = (list(map(tuple, identifiers)), function, args), rrefs[0].owner()
    header = partial(name_needed, identifiers)
    return send_call(owner, run_with_values, call, keep=kept, owner=owner, header=header)


def call_needing(rrefs: Sequence[RRef[Any]], function: Callable[..., Any], args: Sequence[Any]) -> Future[Any]:
    """Calls a function on the owner of references. The call waits there for their values, without a thread.

    The references are among the arguments of the function, which has the values by `RRef._value_here`.
    """
    header = partial(name_needed, [rref._handle.id for rref in rrefs])
    return send_call(rrefs[0].owner(), function, args, header=header)


def remote_needing(
    rrefs: Sequence[RRef[Any]], to: Destination, function: Callable[..., Any], args: Sequence[Any]
) -> RRef[Any]:
    """Calls `remote`. The call waits there for values of that worker, as that of `call_needing` does."""
    handle = create_value(to, function, args, None, UNSET_RPC_TIMEOUT, [rref._handle.id for rref in rrefs])
    return RRef._of(handle, function)
