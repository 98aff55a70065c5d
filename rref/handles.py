"""The handles of RRefs: the owner's handle to a value, and a user's handle to a fork of a reference to it."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from ..errors import RRefError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.execution.ctrl_c import wait_interruptibly
from ..rpc.execution.futures import Future, copy_error, error_of
from .owner_table import GlobalId, OwnedValue

__all__ = ["CreationCall", "Fork", "KeepAlive", "OwnerHandle", "ReferenceExtension", "UserHandle", "references_of"]

CreationCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""The function that makes a value, its positional arguments and its named ones."""


@final
class KeepAlive:
    """Keeps a fork from being deleted: shared by the program's reference and by requests in flight."""

    __slots__ = ("_fork", "_on_released")

    def __init__(self, on_released: "Callable[[Fork], None]", fork: "Fork") -> None:
        """Args: on_released: called with the fork, by a finalizer, when nothing refers to this. Takes no lock."""
        self._on_released = on_released
        self._fork = fork

    def __del__(self) -> None:
        self._on_released(self._fork)


@final
@dataclass(slots=True, eq=False)
class Fork:
    """A fork on the worker that holds it."""

    reference: GlobalId
    """The id of the reference, which is that of the value."""
    id: GlobalId
    owner: WorkerInfo
    is_creator: bool = False
    """Whether this worker has created the value by `remote`."""
    is_doubtful: bool = False
    """On the creator: whether the connection broke before the creation was answered, so that it may be lost."""
    is_confirmed: bool = False
    """Whether the owner is known to have counted the fork."""
    error: Exception | None = None
    """The error because of which the fork will never be confirmed."""
    keep_alive: KeepAlive | None = None
    """None once the program has dropped the reference."""
    is_dropped: bool = False
    """Whether nothing keeps it alive any more."""
    creation: Future[Any] | None = None
    """On the creator: done when the call that makes the value has ended."""
    deletion: list[None] = field(default_factory=lambda: [None])
    """Empty once the owner is told to delete the fork, where it need be told."""
    _waiters: list[threading.Event] = field(default_factory=list)
    """Set by `settle`."""

    def settle(self, error: Exception | None) -> None:
        """Notes that the owner has counted the fork (None), or that it never will (the error)."""
        if error is None:
            self.is_confirmed = True
        else:
            self.error = error
        for waiter in self._waiters:
            waiter.set()

    def wait_until_settled(self, seconds: float | None) -> None:
        """Waits until `settle` has been called, for `seconds` at most."""
        waiter = threading.Event()
        self._waiters.append(waiter)
        if not self.is_confirmed and self.error is None:
            wait_interruptibly(waiter.wait, seconds)

    def state(self) -> str:
        """Returns the state in words: `pending`, `unconfirmed`, `confirmed`, `deleted` or `failed: ...`."""
        error = self.error
        if error is None and self.creation is not None and self.creation.done():
            error = error_of(self.creation)
        if error is not None:
            return f"failed: {type(error).__name__}"
        if self.keep_alive is None:
            return "deleted"
        return "confirmed" if self.is_confirmed else "pending" if self.is_creator else "unconfirmed"


@final
class OwnerHandle:
    """A handle on the owner of a value. Keeps the value."""

    __slots__ = ("agent", "creation", "entry", "id", "keep_alive", "owner")

    def __init__(self, agent: RpcAgent, entry: OwnedValue, creation: Future[Any] | None = None) -> None:
        self.agent = agent
        self.entry = entry
        self.keep_alive = entry
        """The object that a request which names the value keeps alive until it has ended."""
        self.creation = creation
        """Done when the call that makes the value has ended, if this handle is from `remote`."""
        self.id = entry.id
        """The id of the value."""
        self.owner = agent.info
        """The worker that owns the value."""

    def check_usable(self, rref: object, use: str) -> None:  # noqa: ARG002 - as in UserHandle
        """Raises the error that has kept the value from being made; not one that its function raised."""
        if (error := _failure_of(self.creation)) is not None:
            raise copy_error(error) from error.__cause__


@final
class UserHandle:
    """A handle on a worker that does not own the value. Keeps the fork."""

    __slots__ = ("agent", "fork", "id", "owner")

    def __init__(self, agent: RpcAgent, fork: Fork) -> None:
        self.agent = agent
        self.fork = fork
        self.id = fork.reference
        """The id of the value."""
        self.owner = fork.owner
        """The worker that owns the value."""

    @property
    def keep_alive(self) -> object:
        """The object that a request which names the value keeps alive until it has ended."""
        return self.fork.keep_alive

    @property
    def creation(self) -> Future[Any] | None:
        """Done when the call that makes the value has ended, if this handle is from `remote`."""
        return self.fork.creation

    def is_confirmed(self) -> bool:
        """Returns whether the owner is known to have counted the fork; waits for an answer that is on its way."""
        fork = self.fork
        if not fork.is_confirmed and fork.error is None and not fork.is_creator:
            self.agent.control.run(lambda: None)  # so that the control thread sends what it keeps back
            with self.agent.blocking():
                fork.wait_until_settled(self.agent.until_deadline(self.agent.rpc_timeout) or None)
        return fork.is_confirmed

    def check_usable(self, rref: object, use: str) -> None:
        """Raises the error that keeps the reference from being used, and says for what."""
        if self.fork.keep_alive is None:
            raise RRefError(f"{rref} has been deleted. Cannot call {use} on it after deletion.")
        # The control thread may not know yet of a creation that has just failed.
        error = self.fork.error or _failure_of(self.fork.creation)
        if error is not None:
            raise copy_error(error) from error.__cause__

    def __del__(self) -> None:
        self.fork.keep_alive = None


class ReferenceExtension(Extension):
    """The contract between RRefs and the extension that implements the protocol of references."""

    @abstractmethod
    def own(self, value: Any) -> OwnerHandle:
        """Returns a handle to a value that is given to this worker."""

    @abstractmethod
    def create(
        self,
        owner: WorkerInfo,
        call: CreationCall,
        timeout: float | None,
        needed: Sequence[GlobalId] = (),
        keep: object = None,
    ) -> OwnerHandle | UserHandle:
        """Runs a call on a worker, which owns the result; returns a handle to it at once.

        The timeout is in seconds, 0 for none, None for that of the options. The call waits there for the values
        that it needs; `keep` is kept alive until it has ended.
        """

    @abstractmethod
    def entry(self, identifier: GlobalId) -> OwnedValue:
        """Returns the entry of a value that this worker owns. Raises RRefError as `OwnerTable.get`."""


def references_of(agent: RpcAgent) -> ReferenceExtension:
    """Returns the extension of an agent that implements the protocol of references."""
    return agent.extension(ReferenceExtension)  # type: ignore[type-abstract]


def _failure_of(creation: Future[Any] | None) -> Exception | None:
    """Returns why a value could not be made, if that is known."""
    return error_of(creation) if creation is not None and creation.done() else None
