"""The reference that users hold."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast, final

import torch

from ..errors import AutogradError, NotInitializedError, RpcTimeoutError, RRefError
from ..rpc.contracts.agent import RpcAgent, current_agent
from ..rpc.contracts.arguments import UNSET_RPC_TIMEOUT, check_timeout
from ..rpc.contracts.messages import MessageType, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.futures import Future, error_of
from ..rpc.execution.kept_errors import copy_error
from .owner_table import OwnedValue, ValueNotThereError

if TYPE_CHECKING:
    from .forks import Fork
    from .proxy import RRefProxy

__all__ = ["Lease", "OwnerHandle", "RRef", "UserHandle"]

T_co = TypeVar("T_co", covariant=True)


@final
class OwnerHandle:
    """The owner's own hold on a value; `created` is done when the call is over that makes it, if one does."""

    __slots__ = ("agent", "created", "entry")

    def __init__(self, agent: RpcAgent, entry: OwnedValue, created: Future[Any] | None = None) -> None:
        self.agent = agent
        self.entry = entry
        self.created = created

    def check_usable(self, rref: "RRef[Any]", use: str) -> None:  # noqa: ARG002 - as UserHandle's
        """Raises what has kept the value from being made; not what its function raised."""
        if (error := _failure_of(self.created)) is not None:
            raise copy_error(error) from error.__cause__


@final
class Lease:
    """Whoever has it keeps a fork from being given up: the program's reference, and requests under way."""

    __slots__ = ("__weakref__", "_give_up")

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up

    def __del__(self) -> None:
        self._give_up()


@final
class UserHandle:
    """The program's reference to another worker's value."""

    __slots__ = ("agent", "fork")

    def __init__(self, agent: RpcAgent, fork: "Fork") -> None:
        self.agent = agent
        self.fork = fork

    def check_usable(self, rref: "RRef[Any]", use: str) -> None:
        """Raises what keeps the reference from being used."""
        if self.fork.hold is None:
            raise RRefError(f"{rref} has been given up. Cannot call {use} on it after deletion.")
        # The control thread may not have heard yet of a creation that has just failed.
        error = self.fork.error or _failure_of(self.fork.created)
        if error is not None:
            raise copy_error(error) from error.__cause__

    def __del__(self) -> None:
        self.fork.hold = None


@final
class RRef(Generic[T_co]):
    """A reference to a value on some worker, its owner.

    `RRef(value)` makes one to a value here; `remote` makes one to a value elsewhere. A reference can be
    passed to other workers in calls and results; the value lives as long as any reference to it does.

    Args:
        value: anything; it stays as it is and where it is.
        type_hint: the value's type, for readers and type checkers.
    """

    __slots__ = ("__weakref__", "_handle", "_made_by", "_type")

    _handle: OwnerHandle | UserHandle
    _made_by: type | None
    """The class of the value, where it is known from the call that has made it."""
    _type: torch.futures.Future[type] | None

    def __init__(self, value: T_co, type_hint: object = None) -> None:  # noqa: ARG002
        from .forks import References  # here, because it makes RRefs

        self._handle = current_agent().extension(References).own(value)
        self._made_by = None
        self._type = None

    @classmethod
    def _of(cls, handle: OwnerHandle | UserHandle, function: object = None) -> "RRef[Any]":
        rref: RRef[Any] = cls.__new__(cls)
        rref._handle = handle
        rref._made_by = function if isinstance(function, type) else None
        rref._type = None
        return rref

    def is_owner(self) -> bool:
        """Does this worker own the value?"""
        return isinstance(self._handle, OwnerHandle)

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        handle = self._handle
        return handle.agent.info if isinstance(handle, OwnerHandle) else handle.fork.owner

    def owner_name(self) -> str:
        """The owner's name."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Has the owner counted this reference? Always true on the owner."""
        handle = self._handle
        return isinstance(handle, OwnerHandle) or handle.fork.confirmed

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """The value: a copy of it, or itself on the owner. Waits until it is there.

        Args:
            timeout: seconds, 0 for none. By default that of the options.

        Raises:
            Exception: what the call that makes the value raised.
            RpcTimeoutError: the value did not come in time.
            WorkerLostError: its owner is gone.
            RRefError: the owner has no such value (any more).
        """
        handle = self._handle
        seconds = check_timeout(timeout)
        if isinstance(handle, OwnerHandle):
            return self._wait(handle, handle.agent.rpc_timeout if seconds is None else seconds)
        value: T_co = self._fetch(handle, seconds).wait()
        return value

    async def to_here_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """What `to_here` does, for asyncio programs. Cancelling it gives the request up, not the value."""
        handle = self._handle
        seconds = check_timeout(timeout)
        value: T_co
        if isinstance(handle, OwnerHandle):
            seconds = handle.agent.rpc_timeout if seconds is None else seconds
            there = asyncio.shield(asyncio.wrap_future(handle.entry.future))
            try:
                value = await asyncio.wait_for(there, seconds or None)
            except Exception as error:
                if isinstance(error, TimeoutError) and not handle.entry.future.done():
                    raise _too_late(handle, seconds) from None
                raise copy_error(error).with_traceback(error.__traceback__) from error.__cause__
        else:
            value = await self._fetch(handle, seconds)
        return value

    def local_value(self) -> T_co:
        """The value itself, on its owner. Waits until it is there.

        Raises:
            RRefError: this worker does not own it.
            Exception: what the call that makes the value raised.
        """
        handle = self._handle
        if not isinstance(handle, OwnerHandle):
            raise RRefError(
                f"For UserRRef(rref_id={handle.fork.reference}, fork_id={handle.fork.id}), can't call "
                f"localValue() on user {handle.agent.info}. Call it on owner {handle.fork.owner}, or use "
                "to_here() for a copy"
            )
        return self._wait(handle, 0.0)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass from the value, a scalar tensor that requires grad, on its owner.

        Args:
            dist_autograd_ctx_id: the context in which the gradients are added up. Without one the owner, and only
                the owner, can run an ordinary backward pass, into the `.grad` of the leaves.
            retain_graph: keep what another pass over the same graph needs.

        Raises:
            AutogradError: the value is no tensor, or cannot be differentiated.
            UnknownContextError: no such context.
            Exception: what went wrong on any worker.
        """
        handle = self._handle
        if dist_autograd_ctx_id != -1:
            request = Request(
                MessageType.RREF_BACKWARD,
                (self, dist_autograd_ctx_id, retain_graph),
                timeout=0.0,  # none, as for autograd.backward
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
        """`rref.rpc_sync().method(*args)` runs a method of the value on its owner; the result comes back."""
        proxy: Any = self._proxy("rpc_sync", timeout)  # which has the methods of a T, so for users it is one
        return cast(T_co, proxy)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy[Future[Any]]":
        """`rref.rpc_async().method(*args)` does so too, and returns a future."""
        return self._proxy("rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy[RRef[Any]]":
        """`rref.remote().method(*args)` does so too, leaves the result there and returns an RRef to it."""
        return self._proxy("remote", timeout)

    def _get_future(self) -> torch.futures.Future[Any]:
        """Done when the call is over that makes the value; fails if it could not be made in time.

        Raises:
            RRefError: this worker did not create the reference by `remote`.
        """
        handle = self._handle
        created = handle.created if isinstance(handle, OwnerHandle) else handle.fork.created
        if created is None:
            raise RRefError(f"{self} was not created by a call of remote() on this worker, so it has no future")
        return created

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value, asked for once.

        Args:
            timeout: seconds that the owner may take to tell, 0 for none. By default that of the options.
            blocking: return the type, else a future of it.
        """
        if self._type is None:
            from .proxy import ask_type  # here, because it calls with RRefs

            self._type = ask_type(self, timeout)
        asked = self._type
        if not blocking:
            return asked
        try:
            return asked.wait()
        except Exception:
            self._type = None  # the next may have more luck
            raise

    def _known_type(self) -> type | None:
        """The type of another worker's value, as far as this worker knows it."""
        asked = self._type
        if asked is not None and asked.done() and error_of(asked) is None:
            return asked.value()
        return self._made_by

    def _proxy(self, how: str, timeout: float) -> "RRefProxy[Any]":
        from .proxy import RRefProxy  # here, because it calls with RRefs

        return RRefProxy(self, how, timeout)

    def _fetch(self, handle: UserHandle, seconds: float | None) -> Future[Any]:
        handle.check_usable(self, "to_here()")
        identifier = tuple(handle.fork.reference)
        try:
            return handle.agent.request(
                handle.fork.owner,
                Request(MessageType.RREF_FETCH, identifier, timeout=seconds, keep=handle.fork.hold),
            )
        except NotInitializedError as error:
            raise NotInitializedError(
                f"{error}. {self} is gone: Cannot call to_here() on it after deletion."
            ) from None

    def _wait(self, handle: OwnerHandle, seconds: float) -> T_co:
        try:
            with handle.agent.blocking():
                value: T_co = handle.entry.wait(seconds)
        except ValueNotThereError:
            raise _too_late(handle, seconds) from None
        return value

    def __repr__(self) -> str:
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            identifier, kind, state = handle.entry.id, None, handle.entry.state()
            if state == "here":
                kind = type(handle.entry.future.result())
        else:
            identifier, kind, state = handle.fork.reference, self._known_type(), handle.fork.state()
        parts = [f"owner={self.owner_name()!r}", f"id={identifier.worker}.{identifier.number}"]
        if kind is not None:
            parts.append(f"type={kind.__name__}")
        return f"RRef({', '.join([*parts, state])})"

    def __str__(self) -> str:
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            return f"OwnerRRef({handle.entry.id})"
        return f"UserRRef(RRefId = {handle.fork.reference}, ForkId = {handle.fork.id})"

    def __reduce__(self) -> NoReturn:
        raise RRefError(
            f"Can not pickle rref in python pickler: {self} can only be pickled when it is sent in a call or "
            "its result"
        )


def _failure_of(created: Future[Any] | None) -> Exception | None:
    """Why a value could not be made, if that is known."""
    return error_of(created) if created is not None and created.done() else None


def _too_late(handle: OwnerHandle, seconds: float) -> RpcTimeoutError:
    return RpcTimeoutError(handle.agent.info.name, seconds, "waiting for a value on worker")
