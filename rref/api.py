"""Calls whose results stay where they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, overload

from ..rpc.contracts.agent import Destination, current_agent
from ..rpc.contracts.arguments import UNSET_RPC_TIMEOUT, check_call, check_timeout
from ..rpc.profiling.extension import RPCExecMode, profiled_call
from ..rpc.wire.script import not_scriptable
from .forks import References
from .rref import RRef

__all__ = ["remote"]

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
        to: a worker's name, id or WorkerInfo; this worker itself too.
        func: a function or class that the other worker can import.
        args: its positional arguments, anything that pickles.
        kwargs: its named arguments.
        timeout: seconds within which the owner must confirm the reference, 0 for none; the function itself
            may take longer. By default that of the options.

    Returns:
        A reference. What goes wrong with the call is raised by its `to_here`.

    Raises:
        NotInitializedError, UnknownWorkerError, SerializationError, TypeError, ValueError: nothing was sent.
    """
    agent = current_agent()
    owner = agent.worker(to)
    call = check_call(func, args, kwargs)
    seconds = check_timeout(timeout)
    with profiled_call(agent, RPCExecMode.REMOTE, func, owner):
        return agent.extension(References).remote(owner, call, seconds)
