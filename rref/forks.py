"""How workers count references to each other's values.

The protocol is that of the design note "Remote Reference Protocol" in PyTorch's documentation, with
acknowledged messages throughout (`gradwire.rpc.agent.control`), so that none is lost or counted twice:

* The owner keeps a value while a fork, that is another worker's reference, lives.
* `remote` makes the first fork; the owner confirms it by answering the creating message.
* A worker that passes its reference on makes a fork for the receiver. The receiver tells the owner of it,
  and when the owner has confirmed it, tells the sender. Until then the sender keeps its own reference, so
  the value cannot vanish in between. A fork that the owner itself sends is counted before it leaves.
* A reference that is dropped is reported to the owner, but not before the owner has confirmed it, nor while a
  request that names the value is on its way: a request never comes to its owner after its reference is gone.
* An owner that hears of a value whose creating message has not come asks its creator whether it will: after the
  loss of a worker a message may name a value that has come and gone.
* A lost worker's references are dropped by the owner, and nobody keeps anything for it any longer.

docs/rref.md draws the states.
"""

import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from ..errors import RemoteError, RpcTimeoutError, RRefError, SendFailedError, WorkerLostError
from ..proto.v1 import agent_pb2
from ..rpc.call_handler import logged, run_function
from ..rpc.calls import name_of
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Deferred, Handler, Incoming, MessageType, Outgoing, Request
from ..rpc.contracts.worker import WorkerInfo
from ..rpc.contracts.worker_end import WorkerEnd
from ..rpc.execution.futures import Future, error_of
from ..rpc.profiling.extension import run_profiled
from ..rpc.wire.failures import with_traceback_as_text
from .ids import GlobalId, IdSource
from .owner_table import OwnedValue, OwnerTable
from .rref import Lease, OwnerHandle, RRef, UserHandle

__all__ = ["Fork", "References"]

log = logging.getLogger(__name__)

CreationCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@final
@dataclass(slots=True, eq=False)
class Fork:
    """A reference that this worker holds to another's value. Changes on the control thread only."""

    reference: GlobalId
    id: GlobalId
    owner: WorkerInfo
    creating: bool = False
    """Did this worker create the value?"""
    confirmed: bool = False
    error: Exception | None = None
    """Why it never will be confirmed."""
    hold: Lease | None = None
    """What keeps it from being given up."""
    dropped: bool = False
    created: Future[Any] | None = None
    """Of the creating worker: done when the call that makes the value is over."""

    def state(self) -> str:
        """Returns how it stands with the reference, in words."""
        error = self.error
        if error is None and self.created is not None and self.created.done():
            error = error_of(self.created)
        if error is not None:
            return f"failed: {type(error).__name__}"
        if self.hold is None:
            return "deleted"
        return "confirmed" if self.confirmed else "pending" if self.creating else "unconfirmed"


@final
class References(Extension):
    """The references of one worker: those it holds, and those others hold to its values."""

    control_kinds = ("rref.accept", "rref.await", "rref.delete", "rref.fork")

    reference_type = RRef

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self.table = OwnerTable(agent.info.id)
        self._ids = IdSource(agent.info.id)
        self._users: set[Fork] = set()
        self._children: dict[GlobalId, tuple[UserHandle, int]] = {}
        self._fewer = threading.Condition()
        """Notified when the owner of a dropped fork knows."""
        self._unconfirmed: list[Callable[[], None]] = []
        """Who waits for confirmations. On the control thread."""
        self._creating: weakref.WeakValueDictionary[GlobalId, Lease] = weakref.WeakValueDictionary()
        """What `remote` has made here and is held yet, be it by the creating message on its way."""
        self._closed = False
        agent.control.on("rref.fork", self._on_fork)
        agent.control.on("rref.await", self._on_await)
        agent.control.on("rref.accept", self._on_accept)
        agent.control.on("rref.delete", self._on_delete)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Creating and fetching."""
        return {
            MessageType.RREF_CREATE: Handler(
                self._create,
                user_values=True,
                operation="remote",
                description="RRef creation via remote() on worker",
            ),
            MessageType.RREF_FETCH: Handler(
                self._fetch,
                user_values=True,
                cancellable=True,
                operation="to_here",
                description="to_here() of a value on worker",
            ),
        }

    # Making references.

    def own(self, value: Any) -> OwnerHandle:
        """A reference to a value here."""
        entry = self.table.create(self._ids.next())
        self.table.begin(entry)
        entry.resolve(value)
        return OwnerHandle(self.agent, entry)

    def remote(self, owner: WorkerInfo, call: CreationCall, timeout: float | None) -> RRef[Any]:
        """A reference to the result of a call on `owner`."""
        identifier, fork_id = self._ids.next(), self._ids.next()
        if owner == self.agent.info:
            return RRef._of(self._create_here(identifier, fork_id, call, timeout), call[0])
        fork = Fork(identifier, fork_id, owner, creating=True)
        handle = self._take_hold(fork)
        if fork.hold is not None:
            self._creating[identifier] = fork.hold
        try:
            fork.created = self._request_creation(owner, identifier, fork_id, call, timeout, keep=fork.hold)
        except BaseException:
            self._forget(fork)
            raise
        if fork.created.done():  # what has not been sent is known at once, so that it is not passed on
            fork.error = error_of(fork.created)
        fork.created.add_done_callback(
            lambda done: self.agent.control.run(partial(self._confirm, fork, error_of(done)))
        )
        return RRef._of(handle, call[0])

    def _create_here(
        self, identifier: GlobalId, fork_id: GlobalId, call: CreationCall, timeout: float | None
    ) -> OwnerHandle:
        entry = self.table.create(identifier)
        self.table.add_fork(identifier, fork_id, self.agent.info.id)  # keeps the entry until the call has run

        def over(done: torch.futures.Future[Any]) -> None:
            if (error := error_of(done)) is not None:
                entry.fail(error)
            self.table.remove_fork(identifier, fork_id)

        try:
            created = self._request_creation(self.agent.info, identifier, fork_id, call, timeout)
        except BaseException:
            self.table.remove_fork(identifier, fork_id)
            raise
        created.add_done_callback(over)
        return OwnerHandle(self.agent, entry, created)

    def _request_creation(
        self,
        owner: WorkerInfo,
        identifier: GlobalId,
        fork: GlobalId,
        call: CreationCall,
        timeout: float | None,
        keep: object = None,
    ) -> Future[Any]:
        created = _reference(identifier, fork, owner.id)
        future = self.agent.request(
            owner,
            Request(
                MessageType.RREF_CREATE,
                call,
                timeout=timeout,
                what=("the function", "args", "kwargs"),
                header=lambda envelope: envelope.created.CopyFrom(created),
                keep=keep,
            ),
        )
        future.operation = f"remote {name_of(call[0])}"
        return future

    def _take_hold(self, fork: Fork) -> UserHandle:
        self._users.add(fork)
        fork.hold = Lease(partial(self._give_up, fork))
        return UserHandle(self.agent, fork)

    # References that leave and arrive in messages.

    def on_send(self, message: Outgoing) -> None:
        """Makes a fork of every reference."""
        for rref in message.references:
            handle, fork = rref._handle, self._ids.next()
            if handle.agent is not self.agent:
                raise RRefError(
                    f"{rref} belongs to an agent that has shut down. Cannot call fork an UserRRef after deletion."
                )
            try:
                handle.check_usable(rref, "fork an UserRRef")
            except RRefError:
                raise
            except Exception as error:  # not to be taken for the fate of this message
                raise RRefError(f"{rref} cannot be passed on: {error}") from error
            if isinstance(handle, OwnerHandle):
                identifier, owner = handle.entry.id, self.agent.info.id
                self.table.add_fork(identifier, fork, message.destination.id)
            else:
                identifier, owner = handle.fork.reference, handle.fork.owner.id
                self._children[fork] = (handle, message.destination.id)
            message.envelope.references.append(_reference(identifier, fork, owner))

    def on_send_aborted(self, message: Outgoing) -> None:
        """The forks will not come to be."""
        for reference in message.envelope.references:
            fork = GlobalId.from_proto(reference.fork)
            if self._children.pop(fork, None) is None:
                self.table.remove_fork(GlobalId.from_proto(reference.reference), fork)

    def on_receive(self, message: Incoming) -> None:
        """Takes the forks over, whether or not the message can be unpickled afterwards."""
        message.references.extend(
            RRef._of(self._take_over(message.source, reference)) for reference in message.envelope.references
        )
        if message.envelope.HasField("created"):
            message.state[References] = self._begin_creation(message)

    def wait_before_run(self, message: Incoming) -> "concurrent.futures.Future[None] | None":
        """A function may count on it that the references in its arguments are confirmed."""
        forks = [r._handle.fork for r in message.references if isinstance(r._handle, UserHandle)]
        if all(fork.confirmed for fork in forks):
            return None
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()

        def look(_error: object = None) -> None:
            if self._closed or all(fork.confirmed or fork.error for fork in forks):
                ready.set_result(None)
            else:
                self._unconfirmed.append(look)

        self.agent.control.run(look)
        return None if self._closed else ready  # if closed by now, it may have come too late to be run

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Takes the references over, only to drop them; nobody is to wait for a value that cannot come."""
        self.on_receive(message)
        entry = message.state.get(References)
        if entry is not None:
            entry.fail(error)

    def _take_over(self, sender: WorkerInfo, reference: agent_pb2.Reference) -> "OwnerHandle | UserHandle":
        identifier, fork_id = GlobalId.from_proto(reference.reference), GlobalId.from_proto(reference.fork)
        owner = self.agent.worker(reference.owner)
        if owner == self.agent.info:
            try:
                entry = self.entry(identifier)
            except RRefError as error:  # lost with the worker that had it first; whoever uses it is told
                entry = OwnedValue(identifier)
                entry.fail(error)
            handle = OwnerHandle(self.agent, entry)
            if sender == owner:
                self.table.remove_fork(identifier, fork_id)
            else:
                self.agent.control.send(sender, "rref.accept", tuple(fork_id))
            return handle
        fork = Fork(identifier, fork_id, owner, confirmed=sender == owner)
        if not fork.confirmed:

            def registered(error: Exception | None) -> None:
                self._confirm(fork, error)
                self.agent.control.send(sender, "rref.accept", tuple(fork_id))

            self.agent.control.send(owner, "rref.fork", (tuple(identifier), tuple(fork_id)), registered)
        return self._take_hold(fork)

    # The life of a fork, on the control thread.

    def _give_up(self, fork: Fork) -> None:
        """Nothing holds a fork any longer. Called by finalizers: takes no lock."""
        self.agent.control.run(partial(self._drop, fork))

    def give_up_all(self, timeout: float) -> None:
        """Gives up all references of this worker to values of others, and waits until their owners know.

        Those that the program still has cannot be used any more.

        Args:
            timeout: seconds.

        Raises:
            RpcTimeoutError: an owner has not confirmed it in time.
        """
        for fork in list(self._users):
            fork.hold = None
        with self._fewer:
            if not self._fewer.wait_for(lambda: not self._users, timeout):
                owners = sorted({fork.owner.name for fork in list(self._users)})
                raise RpcTimeoutError(", ".join(owners), timeout, "giving up references to values of")

    def _drop(self, fork: Fork) -> None:
        fork.dropped = True
        self._delete_if_due(fork)

    def _confirm(self, fork: Fork, error: Exception | None) -> None:
        if error is None:
            fork.confirmed = True
        else:
            fork.error = error
        self._delete_if_due(fork)
        self._tell_waiting()

    def _confirm_none(self) -> None:
        """The agent has shut down: nobody is to wait for confirmations any longer."""
        for fork in list(self._users):  # messages that have come before may still bring some
            if not fork.confirmed and fork.error is None:
                fork.error = RRefError(f"worker {self.agent.info.name!r} has shut down its RPC agent")
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for look in unconfirmed:
            look()

    def _delete_if_due(self, fork: Fork) -> None:
        if not fork.dropped or not (fork.confirmed or fork.error):
            return
        # The owner has counted a creation that was sent, also where it failed: its request is over by now. Any
        # other fork that is not confirmed needs no deleting.
        if fork.confirmed or (fork.creating and not isinstance(fork.error, WorkerLostError | SendFailedError)):
            payload = (tuple(fork.reference), tuple(fork.id))
            self.agent.control.send(fork.owner, "rref.delete", payload, lambda _error: self._forget(fork))
        else:
            self._forget(fork)

    def _forget(self, fork: Fork) -> None:
        with self._fewer:
            self._users.discard(fork)
            self._fewer.notify_all()

    # What other workers tell.

    def _on_fork(self, sender: WorkerInfo, payload: Any) -> None:
        identifier, fork = payload
        self._ask_creator(self.table.add_fork(GlobalId(*identifier), GlobalId(*fork), sender.id))

    def _on_await(self, sender: WorkerInfo, payload: Any) -> None:
        if GlobalId(*payload) not in self._creating:
            raise RRefError(f"reference {GlobalId(*payload)} is gone: {sender.name!r} has deleted the value")

    def _on_delete(self, sender: WorkerInfo, payload: Any) -> None:  # noqa: ARG002
        identifier, fork = payload
        self.table.remove_fork(GlobalId(*identifier), GlobalId(*fork))

    def _on_accept(self, sender: WorkerInfo, payload: Any) -> None:  # noqa: ARG002
        self._children.pop(GlobalId(*payload), None)

    # What other workers ask for.

    def _begin_creation(self, message: Incoming) -> OwnedValue:
        created = message.envelope.created
        identifier, fork = GlobalId.from_proto(created.reference), GlobalId.from_proto(created.fork)
        if message.source == self.agent.info:
            entry = self.table.get(identifier)
        else:
            entry = self.table.add_fork(identifier, fork, message.source.id)
        self.table.begin(entry)
        return entry

    def scope(self, message: Incoming) -> AbstractContextManager[None]:
        """Around the creation of a value."""
        entry = message.state.get(References)
        return nullcontext() if entry is None else self._creation(message, entry)

    @contextmanager
    def _creation(self, message: Incoming, entry: OwnedValue) -> Iterator[None]:
        try:
            yield
        finally:
            if isinstance(message.error, Exception):
                self._fail(entry, message.error)  # its call could not be read

    def _create(self, message: Incoming) -> Deferred | None:
        """Runs a call and keeps its result. Answers when it is over, whether or not it has failed."""
        entry: OwnedValue = message.state[References]
        try:
            with logged(message):
                result = run_profiled(message, run_function, *message.value)
        except Exception as error:
            self._fail(entry, error)
            return None
        except BaseException as error:  # such as SystemExit: it ended the call, not this worker
            entry.fail(RemoteError(self.agent.info.name, f"{type(error).__name__}: {error}", ""))
            return None
        if not isinstance(result, Deferred):
            entry.resolve(result)
            return None
        over: concurrent.futures.Future[None] = concurrent.futures.Future()

        def settle(done: "concurrent.futures.Future[Any]") -> None:
            if isinstance(error := done.exception(), Exception):
                self._fail(entry, error)
            else:
                entry.resolve(done.result())
            over.set_result(None)

        result.future.add_done_callback(settle)
        return Deferred(over)

    def _fail(self, entry: OwnedValue, error: Exception) -> None:
        """The call that makes a value has failed."""
        entry.fail(with_traceback_as_text(error, self.agent.info.name))

    def _fetch(self, message: Incoming) -> Deferred:
        return Deferred(self.entry(GlobalId(*message.value)).future)

    def entry(self, identifier: GlobalId) -> OwnedValue:
        """The entry that a message from another worker names. Raises RRefError as OwnerTable.get does."""
        entry = self.table.get(identifier)
        self._ask_creator(entry)
        return entry

    def _ask_creator(self, entry: OwnedValue) -> None:
        """Is the message that creates an awaited value still to come? Also has the creator's loss be noticed."""
        if entry.created or entry.id.worker == self.agent.info.id:
            return
        creator, identifier = self.agent.worker(entry.id.worker), entry.id

        def answered(error: Exception | None) -> None:
            # Mostly the creating message has come while the question was on its way, and the value has gone since.
            if isinstance(error, RRefError) and self.table.give_up(identifier, error):
                log.warning("a message names a value that cannot come any more: %s", error)

        self.agent.control.send(creator, "rref.await", tuple(identifier), answered, expected=(RRefError,))

    # The rest.

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Reclaims what a lost worker held."""
        self.table.drop_worker(worker.id, end.reason)
        for fork, (_, destination) in list(self._children.items()):
            if destination == worker.id:
                self._children.pop(fork, None)

    def live_objects(self) -> Mapping[str, int]:
        """References held by others to values here, held here, and passed on but not yet counted."""
        return {
            "num_owner_rrefs": len(self.table),
            "num_forks": self.table.fork_count(),
            "num_awaited_rrefs": self.table.awaited_count(),
            "num_user_rrefs": len(self._users),
            "num_pending_users": sum(not (f.confirmed or f.error) for f in list(self._users)),
            "num_pending_children": len(self._children),
            "num_pending_futures": self.agent.control.pending(),
        }

    def close(self) -> None:
        """Forgets all values, and has nobody wait for one any longer."""
        self._closed = True
        self.agent.control.run(self._confirm_none)
        self.table.clear(WorkerLostError(self.agent.info.name, "it has shut down its RPC agent"))
        self._children.clear()


def _reference(identifier: GlobalId, fork: GlobalId, owner: int) -> agent_pb2.Reference:
    return agent_pb2.Reference(reference=identifier.to_proto(), fork=fork.to_proto(), owner=owner)
