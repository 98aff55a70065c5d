"""RRef, the reference that programs use."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast, final

import torch

from ..errors import AutogradError, NotInitializedError, RpcTimeoutError, RRefError
from ..rpc.calls.wait_all import note_future
from ..rpc.contracts.agent import current_agent
from ..rpc.contracts.arguments import UNSET_RPC_TIMEOUT, check_timeout
from ..rpc.contracts.messages import RREF_FETCH, MessageType, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future, error_of
from ..rpc.execution.kept_errors import copy_error
from ..rpc.profiling.extension import RPCExecMode
from .handles import OwnerHandle, UserHandle, references_of
from .ids import name_needed
from .methods import (
    call_method,
    check_agent,
    check_attribute,
    create_value,
    request_confirmation,
    request_method,
    request_type,
)
from .owner_table import ValueTimeoutError

__all__ = ["RRef", "RRefProxy"]

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

    _handle: OwnerHandle | UserHandle
    _made_by: type | None
    """The class of the value, if the call that makes it is known to be a call of that class."""
    _type: torch.futures.Future[type] | None
    """The type of the value, once it has been asked for."""

    def __init__(self, value: T_co, type_hint: object = None) -> None:  # noqa: ARG002
        self._handle = references_of(current_agent()).own(value)
        self._made_by = None
        self._type = None

    @classmethod
    def _of(cls, handle: OwnerHandle | UserHandle, function: object = None) -> "RRef[Any]":
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
            request_confirmation(self._handle)
        return creation

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the value, for which the owner is asked once; a future of it if not `blocking`."""
        if self._type is None and self.is_owner():
            kind = type(self.local_value())
            self._type = torch.futures.Future()
            self._type.set_result(kind)
        elif self._type is None:
            self._type = request_type(self._handle, timeout)
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
        return request_method(self._handle, RPCExecMode.SYNC, timeout, name, args, kwargs).wait_for_answer()

    def _call_async(
        self, timeout: float, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[Any]:
        future = request_method(self._handle, RPCExecMode.ASYNC, timeout, name, args, kwargs)
        note_future(future)
        return future

    def _call_remote(
        self, timeout: float, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "RRef[Any]":
        # A missing attribute is an error now, not when the result is fetched. So is the time-out of a creation.
        handle, asked = self._handle, self._type
        check_agent(handle)
        handle.check_usable(self, "fork an UserRRef")
        kind = None if asked is None or not asked.done() or error_of(asked) is not None else asked.value()
        if kind is None or not hasattr(kind, name):
            policy = handle.agent.options.policy.of(handle.owner.name)
            # A class can be sent to this worker only if it accepts anything, or the class is exposed here, too.
            if policy.accepts != "anything" or not hasattr(self._get_type(timeout), name):
                check_attribute(handle, name, timeout)
        call = (tuple(handle.id), name, args, kwargs)
        kept = handle.keep_alive
        return RRef._of(create_value(handle.owner, call_method, call, None, timeout, (handle.id,), kept))

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
