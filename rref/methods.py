"""Calls that name values by their ids, which makes no forks, and the functions that they run on the owner."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import RRefError
from ..rpc.calls.handler import run_function
from ..rpc.calls.sending import send_call
from ..rpc.contracts.agent import Destination, current_agent
from ..rpc.contracts.arguments import check_call, check_received, check_timeout
from ..rpc.contracts.exposure import MethodGuard, expose, guarded_by
from ..rpc.execution.futures import Future
from ..rpc.profiling.extension import RPCExecMode, profiled_call
from ..torch_internals import profiler_enabled
from .handles import OwnerHandle, UserHandle, references_of
from .ids import GlobalId, name_needed

__all__ = [
    "call_method",
    "check_agent",
    "check_attribute",
    "create_value",
    "method_of_call",
    "request_confirmation",
    "request_method",
    "request_type",
    "run_with_values",
]

USER_CODE_CALLERS = ("_require_attribute", "_run_method")
"""See gradwire.rpc.wire.failures."""

Handle = OwnerHandle | UserHandle


def create_value(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
    needed: Sequence[GlobalId] = (),
    keep: object = None,
) -> Handle:
    """Runs a function on a worker, which owns the result; returns a handle to it. See `gradwire.rpc.remote`.

    The call waits there, without a thread, for the values that it needs; `keep` is kept alive until it has ended.
    """
    agent = current_agent()
    owner = agent.worker(to)
    call = check_call(func, args, kwargs)
    seconds = check_timeout(timeout)
    if not profiler_enabled():
        return references_of(agent).create(owner, call, seconds, needed, keep)
    with profiled_call(agent, RPCExecMode.REMOTE, func, owner):
        return references_of(agent).create(owner, call, seconds, needed, keep)


def request_method(
    handle: Handle,
    mode: RPCExecMode,
    timeout: float,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Future[Any]:
    """Calls a method of a value on its owner; returns a future of the result."""
    return _request(handle, call_method, (name, args, kwargs), timeout, mode, name)


def request_type(handle: Handle, timeout: float) -> Future[type]:
    """Asks the owner of a value for its type; returns a future of it."""
    return _request(handle, _rref_typeof_on_owner, (), timeout)


def request_confirmation(handle: Handle) -> None:
    """Has the owner answer the creation of a value as soon as it can, instead of with another message."""
    _request(handle, _confirm_creation, (), 0.0)


def check_agent(handle: Handle) -> None:
    """Raises RRefError if a handle is of a former agent: the present one may give its id to another value."""
    if handle.agent is not current_agent():
        raise RRefError(
            f"{handle.id} is of an agent that has shut down. Cannot call fork an UserRRef after deletion."
        )


def check_attribute(handle: Handle, name: str, timeout: float) -> None:
    """Asks the owner of a value whether it has an attribute. Raises AttributeError if it has not."""
    _request(handle, _require_attribute, (name,), timeout).wait()


def _request(
    handle: Handle,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    mode: RPCExecMode = RPCExecMode.ASYNC,
    name: str | None = None,
) -> Future[Any]:
    """Calls `function(id of the value, *args)` on the owner."""
    check_agent(handle)
    return send_call(
        handle.owner,
        function,
        (tuple(handle.id), *args),
        timeout=timeout,
        mode=mode,
        keep=handle.keep_alive,
        name=name,
        owner=handle.owner,
        header=partial(name_needed, (handle.id,)),
    )


# On the owner, where these requests wait for the values before they begin. Under a policy that does not accept
# anything, the functions that end in `_guarded` run in place of those that they guard.


def _call_method_guarded(
    guard: MethodGuard,
    identifier: tuple[int, int],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    value = _value(identifier)
    guard(value, name)
    return _run_method(value, name, args, kwargs)


@guarded_by(_call_method_guarded)
def call_method(identifier: tuple[int, int], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a method of a value of this worker."""
    return _run_method(_value(identifier), name, args, kwargs)


@expose
def run_with_values(
    identifiers: Sequence[tuple[int, int]], function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Calls `function(values, *args)` with values of this worker, given by their ids."""
    check_received(identifiers)
    check_received(args)
    return function([_value(identifier) for identifier in identifiers], *args)


def _run_method(value: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    method = getattr(value, name)
    if not callable(method) and not args and not kwargs:
        return method
    return run_function(method, args, kwargs)


@expose
def _rref_typeof_on_owner(identifier: tuple[int, int]) -> type:
    return type(_value(identifier))


@expose
def _confirm_creation(identifier: tuple[int, int]) -> None:
    """Sends what waits for other messages, the answer to the creation of a value included, once it has ended."""
    with contextlib.suppress(Exception):  # that of the function that was to make the value
        _value(identifier)
    current_agent().control.run(lambda: None)


def _require_attribute_guarded(guard: MethodGuard, identifier: tuple[int, int], name: str) -> None:
    value = _value(identifier)
    guard(value, name)
    getattr(value, name)


@guarded_by(_require_attribute_guarded)
def _require_attribute(identifier: tuple[int, int], name: str) -> None:
    getattr(_value(identifier), name)


def _value(identifier: tuple[int, int]) -> Any:
    return references_of(current_agent()).entry(GlobalId(identifier)).value()


def method_of_call(call: Any) -> str | None:
    """Returns which method of a reference's value a call runs; None if it is another call, or malformed."""
    function = call[0].func if type(call[0]) is partial else call[0]  # a policy binds its guard
    if function is not call_method and function is not _call_method_guarded:
        return None
    args = call[1] if len(call) > 1 else ()
    name = args[1] if isinstance(args, tuple | list) and len(args) > 1 else None
    return name if type(name) is str else None
