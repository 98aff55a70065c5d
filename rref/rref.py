"""The reference that users hold."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, final

from ..errors import RpcTimeoutError, RRefError
from ..rpc.agent import RpcAgent, current_agent
from ..rpc.calls import UNSET_RPC_TIMEOUT, check_timeout
from ..rpc.failures import copy_error
from ..rpc.messages import MessageType
from ..rpc.worker import WorkerInfo
from .owner_table import Entry, ValueNotThereError

if TYPE_CHECKING:
    from .forks import Fork
    from .proxy import RRefProxy

__all__ = ["OwnerHandle", "RRef", "UserHandle"]

T = TypeVar("T")


@final
class OwnerHandle:
    """The owner's own hold on a value."""

    __slots__ = ("agent", "entry")

    def __init__(self, agent: RpcAgent, entry: Entry) -> None:
        self.agent = agent
        self.entry = entry


@final
class UserHandle:
    """A hold on another worker's value; `give_up` is told when it ends."""

    __slots__ = ("_give_up", "agent", "fork")

    def __init__(self, agent: RpcAgent, fork: "Fork", give_up: "Callable[[Fork], None]") -> None:
        self.agent = agent
        self.fork = fork
        self._give_up = give_up

    def __del__(self) -> None:
        self._give_up(self.fork)


@final
class RRef(Generic[T]):
    """A reference to a value on some worker, its owner.

    `RRef(value)` makes one to a value here; `remote` makes one to a value elsewhere. A reference can be
    passed to other workers in calls and results; the value lives as long as any reference to it does.
    """

    __slots__ = ("__weakref__", "_handle")

    _handle: OwnerHandle | UserHandle

    def __init__(self, value: T) -> None:
        from .forks import References  # here, because it makes RRefs

        self._handle = current_agent().extension(References).own(value)

    @classmethod
    def _of(cls, handle: OwnerHandle | UserHandle) -> "RRef[Any]":
        rref: RRef[Any] = cls.__new__(cls)
        rref._handle = handle
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

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
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
            return self._wait(handle, handle.agent.options.rpc_timeout if seconds is None else seconds)
        if handle.fork.error is not None:
            raise copy_error(handle.fork.error) from handle.fork.error.__cause__
        identifier = tuple(handle.fork.reference)
        fetched = handle.agent.request(handle.fork.owner, MessageType.RREF_FETCH, identifier, timeout=seconds)
        value: T = fetched.wait()
        return value

    def local_value(self) -> T:
        """The value itself, on its owner. Waits until it is there.

        Raises:
            RRefError: this worker does not own it.
            Exception: what the call that makes the value raised.
        """
        if not isinstance(self._handle, OwnerHandle):
            raise RRefError(
                f"{self} is owned by {self.owner_name()!r}, so it has no local value on "
                f"{self._handle.agent.info.name!r}: use to_here() for a copy"
            )
        return self._wait(self._handle, 0.0)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy":
        """`rref.rpc_sync().method(*args)` runs a method of the value on its owner; the result comes back."""
        return self._proxy("rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy":
        """`rref.rpc_async().method(*args)` does so too, and returns a future."""
        return self._proxy("rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> "RRefProxy":
        """`rref.remote().method(*args)` does so too, leaves the result there and returns an RRef to it."""
        return self._proxy("remote", timeout)

    def _proxy(self, how: str, timeout: float) -> "RRefProxy":
        from .proxy import RRefProxy  # here, because it calls with RRefs

        return RRefProxy(self, how, timeout)

    def _wait(self, handle: OwnerHandle, seconds: float) -> T:
        try:
            with handle.agent.blocking():
                value: T = handle.entry.wait(seconds)
        except ValueNotThereError:
            raise RpcTimeoutError(handle.agent.info.name, seconds, "waiting for a value on worker") from None
        return value

    def __repr__(self) -> str:
        handle = self._handle
        if isinstance(handle, OwnerHandle):
            return f"OwnerRRef({handle.agent.info.name}, id={handle.entry.id.worker}.{handle.entry.id.number})"
        fork = handle.fork
        return (
            f"UserRRef({fork.owner.name}, id={fork.reference.worker}.{fork.reference.number}, "
            f"fork={fork.id.worker}.{fork.id.number})"
        )

    def __reduce__(self) -> NoReturn:
        raise RRefError(f"{self} cannot be pickled: references travel in calls and their results only")
