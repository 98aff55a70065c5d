"""RRef, the reference that programs use, `remote`, which makes one, and the calls on values that references name.

Such a call names the value by its id, which makes no fork. On the owner it waits for the value before it begins.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, TypeVarTuple, cast, final, overload

import torch

from ..errors import AutogradError, NotInitializedError, RpcTimeoutError, RRefError
from ..rpc.calls.handler import run_function
from ..rpc.calls.sending import note_future, send_call
from ..rpc.contracts.agent import Destination, current_agent
from ..rpc.contracts.messages import (
    RREF_FETCH,
    UNSET_RPC_TIMEOUT,
    MessageType,
    Request,
    check_call,
    check_received,
    check_timeout,
)
from ..rpc.contracts.policy import MethodGuard, expose, guarded_by
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future, copy_error, error_of
from ..rpc.profiling.extension import RPCExecMode, profiled_call
from ..torch_internals import not_scriptable, profiler_enabled
from .handles import OwnerHandle, UserHandle, references_of
from .owner_table import GlobalId, ValueTimeoutError, name_needed

__all__ = [
    "RRef",
    "RRefProxy",
    "call_method",
    "call_needing",
    "call_with_values",
    "method_of_call",
    "remote",
    "remote_needing",
]

USER_CODE_CALLERS = ("_require_attribute", "_run_method")
"""See gradwire.rpc.wire.failures."""

Handle = OwnerHandle | UserHandle

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

T_co = TypeVar("T_co", covariant=True)

K = TypeVar("K")
"""The type of a call through a proxy: that of the method's result, a future of it, or a reference to it."""


@final
class RRefProxy(Generic[K]):
    """Offers the methods of the referenced value; other attributes are methods that return them."""

    __slots__ = ("__call",)

    def __init__(self, call: Callable[[str, Sequence[Any], Mapping[str, Any]], K]) -> None:
        """Args: call: calls a method, by name, with positional and named arguments."""
        self.__call = call

    def __getattr__(self, name: str) -> Callable[..., K]:
        call = self.__call

        def call_method(*args: Any, **kwargs: Any) -> K:
            return call(name, args, kwargs)

        return call_method


@final
class RRef(Generic[T_co]):
    """A reference to a value on some worker, its owner.

    `RRef(value)` refers to a value on this worker; `remote` makes a reference to a value on another. References
    can be passed to other workers in calls and results; the value is kept as long as any reference to it exists.

    Args:
        value: anything; it is neither copied nor moved.
        type_hint: the value's type, for readers and type checkers.
    """

    __slots__ = ("__weakref__", "_handle", "_made_by", "_type")

    _handle: Handle
    _made_by: type | None
    """The class of the value, if the call that makes it is known to be a call of that class."""
    _type: torch.futures.Future[type] | None
    """The type of the value, once it has been asked for."""

    def __init__(self, value: T_co, type_hint: object = None) -> None:  # noqa: ARG002
        self._handle = references_of(current_agent()).own(value)
        self._made_by = None
        self._type = None

    @classmethod
    def _of(cls, handle: Handle, function: object = None) -> "RRef[Any]":
        """Returns a reference with this handle to the value that a function makes, if that is known."""
        rref: RRef[Any] = cls.__new__(cls)
        rref._handle = handle
        rref._made_by = function if isinstance(function, type) else None
        rref._type = None
        return rref

    def is_owner(self) -> bool:
        """Returns whether this worker owns the value."""
        return isinstance(self._handle, OwnerHandle)

    def owner(self) -> WorkerInfo:
        """Returns the worker that owns the value."""
        return self._handle.owner

    def owner_name(self) -> str:
        """Returns the owner's name."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Returns whether the owner is known to have counted this reference; True on the owner.

        For a reference that was received from a worker, waits for the owner's answer. For one that `remote` has
        created here, it is False until the call that makes the value has ended.
        """
        handle = self._handle
        return isinstance(handle, OwnerHandle) or handle.is_confirmed()

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """Waits for the value and returns a copy of it; on the owner, the value itself.

        Args:
            timeout: seconds, 0 for no timeout. By default that of the options.

        Raises:
            Exception: what the call that makes the value raised.
            RpcTimeoutError: the value did not arrive in time.
            WorkerLostError: the owner is lost.
            RRefError: the reference, or the value, has been deleted.
        """
        handle = self._handle
        seconds = check_timeout(timeout)
        if isinstance(handle, OwnerHandle):
            return self._wait(handle, handle.agent.rpc_timeout if seconds is None else seconds)
        value: T_co = self._fetch(handle, seconds).wait_for_answer()
        return value

    async def to_here_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """Returns the value as `to_here` does, in asyncio programs. Cancelling it cancels the request only."""
        handle = self._handle
        seconds = check_timeout(timeout)
        value: T_co
        if isinstance(handle, OwnerHandle):
            seconds = handle.agent.rpc_timeout if seconds is None else seconds
            shielded = asyncio.shield(asyncio.wrap_future(handle.entry.future))
            try:
                value = await asyncio.wait_for(shielded, seconds or None)
            except Exception as error:
                if isinstance(error, TimeoutError) and handle.entry.outcome is None:
                    raise _value_timeout(handle, seconds) from None
                raise copy_error(error).with_traceback(error.__traceback__) from error.__cause__
        else:
            try:
                fetched = await handle.agent.request_async(handle.owner, self._fetch_request(handle, seconds))
            except NotInitializedError as error:
                raise self._gone(error) from None
            value = await fetched
        return value

    def local_value(self) -> T_co:
        """Waits for the value and returns it, on its owner.

        Raises:
            RRefError: this worker does not own the value.
            RpcTimeoutError: the call that makes the value did not end in time.
            Exception: what the call that makes the value raised.
        """
        handle = self._handle
        if not isinstance(handle, OwnerHandle):
            raise RRefError(
                f"For UserRRef(rref_id={handle.id}, fork_id={handle.fork.id}), can't call "
                f"localValue() on user {handle.agent.info}. Call it on owner {handle.fork.owner}, or use "
                "to_here() for a copy"
            )
        return self._wait(handle, 0.0)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass from the value, a scalar tensor that requires grad, on its owner.

        Args:
            dist_autograd_ctx_id: the context that accumulates the gradients. Without one this is an ordinary
                backward pass, which accumulates into `.grad`, and the owner must call it.
            retain_graph: keep the graph for further passes over it.

        Raises:
            AutogradError: the value is not a tensor, or cannot be differentiated.
            UnknownContextError: there is no such context.
            Exception: the first error on any worker.
        """
        handle = self._handle
        if dist_autograd_ctx_id != -1:
            request = Request(
                MessageType.RREF_BACKWARD,
                (self, dist_autograd_ctx_id, retain_graph),
                timeout=0.0,  # none, as for autograd.backward
                header=partial(name_needed, (handle.id,)),
            )
            handle.agent.request(self.owner(), request).wait()
            return
        if not isinstance(handle, OwnerHandle):
            raise AutogradError(f"User RRefs require 'dist_autograd_ctx_id' to be specified, and {self} is one")
        value = self.local_value()
        if not isinstance(value, torch.Tensor):
            raise AutogradError(f"RRef should contain a tensor for .backward(), but {self} has {value!r}")
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """Returns a proxy: `rref.rpc_sync().method(*args)` runs a method on the owner and returns the result."""
        proxy: Any = RRefProxy(partial(self._call_sync, timeout))  # has the methods of a T, so it is typed as one
        return cast(T_co, proxy)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy[Future[Any]]":
        """Returns a proxy: `rref.rpc_async().method(*args)` runs a method on the owner and returns a future."""
        return RRefProxy(partial(self._call_async, timeout))

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy[RRef[Any]]":
        """Returns a proxy: `rref.remote().method(*args)` runs a method on the owner and returns an RRef."""
        return RRefProxy(partial(self._call_remote, timeout))

    def _get_future(self) -> torch.futures.Future[Any]:
        """Returns a future that is done when the call of `remote` that makes the value has ended, or times out."""
        creation = self._handle.creation
        if creation is None:
            raise RRefError(f"{self} was not created by a call of remote() on this worker, so it has no future")
        if isinstance(self._handle, UserHandle) and not creation.done():
            # So that the owner answers the creation as soon as it can, instead of with another message.
            _request(self._handle, _confirm_creation, (), 0.0)
        return creation

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the value, for which the owner is asked once; a future of it if not `blocking`."""
        if self._type is None and self.is_owner():
            kind = type(self.local_value())
            self._type = torch.futures.Future()
            self._type.set_result(kind)
        elif self._type is None:
            self._type = _request(self._handle, _rref_typeof_on_owner, (), timeout)
        asked = self._type
        if not blocking:
            return asked
        try:
            return asked.wait()
        except Exception:
            self._type = None  # the next call asks again
            raise

    def _known_type(self) -> type | None:
        """Returns the type of another worker's value if this worker knows it."""
        asked = self._type
        if asked is not None and asked.done() and error_of(asked) is None:
            return asked.value()
        return self._made_by

    def _call_sync(self, timeout: float, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = name, args, kwargs
        return _request(self._handle, call_method, call, timeout, RPCExecMode.SYNC, name).wait_for_answer()

    def _call_async(
        self, timeout: float, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        call = name, args, kwargs
        future = _request(self._handle, call_method, call, timeout, RPCExecMode.ASYNC, name)
        note_future(future)
        return future

    def _call_remote(
        self, timeout: float, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "RRef[Any]":
        # A missing attribute is an error now, not when the result is fetched. So is the time-out of a creation.
        handle, asked = self._handle, self._type
        _check_agent(handle)
        handle.check_usable(self, "fork an UserRRef")
        kind = None if asked is None or not asked.done() or error_of(asked) is not None else asked.value()
        if kind is None or not hasattr(kind, name):
            policy = handle.agent.options.policy.of(handle.owner.name)
            # A class can be sent to this worker only if it accepts anything, or the class is exposed here, too.
            if policy.accepts != "anything" or not hasattr(self._get_type(timeout), name):
                _request(handle, _require_attribute, (name,), timeout).wait()  # raises AttributeError
        call = (tuple(handle.id), name, args, kwargs)
        kept = handle.keep_alive
        return RRef._of(_create_value(handle.owner, call_method, call, None, timeout, (handle.id,), kept))

    def _fetch(self, handle: UserHandle, seconds: float | None) -> Future[Any]:
        try:
            return handle.agent.request(handle.owner, self._fetch_request(handle, seconds))
        except NotInitializedError as error:
            raise self._gone(error) from None

    def _fetch_request(self, handle: UserHandle, seconds: float | None) -> Request:
        handle.check_usable(self, "to_here()")
        fork = handle.fork
        header = partial(name_needed, (fork.reference,))
        return Request(RREF_FETCH, None, seconds, header=header, keep=fork.keep_alive)

    def _gone(self, error: NotInitializedError) -> NotInitializedError:
        """Returns the error of a fetch after shutdown; in a forked child, the one that its agent raises."""
        if self._handle.agent.is_inherited:
            return error
        return NotInitializedError(f"{error}. {self} is gone: Cannot call to_here() on it after deletion.")

    def _value_here(self) -> Any:
        """Returns the value, for which the request that uses it has waited, on its owner. Raises its error."""
        handle = self._handle
        return handle.entry.value() if isinstance(handle, OwnerHandle) else self.local_value()

    def _wait(self, handle: OwnerHandle, seconds: float) -> T_co:
        """Waits for the value, but not longer than the caller of a function that waits for it does."""
        seconds = handle.agent.until_deadline(seconds)
        try:
            value: T_co = handle.entry.wait(seconds, handle.agent.blocking)
        except ValueTimeoutError:
            raise _value_timeout(handle, seconds) from None
        return value

    def __repr__(self) -> str:
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            kind, state = None, handle.entry.state()
            if state == "here":
                kind = type(handle.entry.wait(0))
        else:
            kind, state = self._known_type(), handle.fork.state()
        parts = [f"owner={self.owner_name()!r}", f"id={handle.id.worker}.{handle.id.number}"]
        if kind is not None:
            parts.append(f"type={kind.__name__}")
        return f"RRef({', '.join([*parts, state])})"

    def __str__(self) -> str:
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            return f"OwnerRRef({handle.id})"
        return f"UserRRef(RRefId = {handle.id}, ForkId = {handle.fork.id})"

    def __reduce__(self) -> NoReturn:
        raise RRefError(
            f"Can not pickle rref in python pickler: {self} can only be pickled when it is sent in a call or "
            "its result"
        )


def _value_timeout(handle: OwnerHandle, seconds: float) -> RpcTimeoutError:
    return RpcTimeoutError(handle.agent.info.name, seconds, "waiting for a value on worker")


def _create_value(
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


def _check_agent(handle: Handle) -> None:
    """Raises RRefError if a handle is of a former agent: the present one may give its id to another value."""
    if handle.agent is not current_agent():
        raise RRefError(
            f"{handle.id} is of an agent that has shut down. Cannot call fork an UserRRef after deletion."
        )


def _request(
    handle: Handle,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    mode: RPCExecMode = RPCExecMode.ASYNC,
    name: str | None = None,
) -> Future[Any]:
    """Calls `function(id of the value, *args)` on the owner."""
    _check_agent(handle)
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
def _run_with_values(
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
    return RRef._of(_create_value(to, func, args, kwargs, timeout), func)


def call_with_values(rrefs: Sequence[RRef[Any]], function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls `function(values, *args)` on the worker that owns the values of all references. Makes no forks."""
    handles = [rref._handle for rref in rrefs]
    for handle in handles:
        _check_agent(handle)
    identifiers, kept = [handle.id for handle in handles], [handle.keep_alive for handle in handles]
    call, owner = (list(map(tuple, identifiers)), function, args), rrefs[0].owner()
    header = partial(name_needed, identifiers)
    return send_call(owner, _run_with_values, call, keep=kept, owner=owner, header=header)


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
    handle = _create_value(to, function, args, None, UNSET_RPC_TIMEOUT, [rref._handle.id for rref in rrefs])
    return RRef._of(handle, function)
