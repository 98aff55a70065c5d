"""The protocol by which owners count the references of other workers to their values.

It is that of PyTorch's design note "Remote Reference Protocol", with acknowledged control messages throughout:

* A *fork* is one worker's reference to another's value. The owner keeps a value as long as it has forks.
* `remote` makes the first fork. The owner confirms it by its answer to the creating message.
* A worker that passes a reference on makes a fork for the receiver. The receiver reports the fork to the owner
  and, once the owner has confirmed it, tells the sender. Until then the sender keeps its own fork, so the owner
  always counts at least one, and the receiver may use its reference at once. A fork that the owner sends is
  counted before it leaves.
* A dropped fork is reported to the owner, but not before the owner has confirmed it, nor while a request that
  names the value is in flight: no request reaches the owner after the fork of its sender is gone.
* An owner that receives the name of a value before its creating message asks the creator whether it will arrive:
  after the loss of a worker, a message may name a value that has been created and deleted.
* The forks of a lost worker are removed by the owner, and no worker keeps anything for it.

A message that was on its way when its connection broke may be lost, with its references. So when a suspect
worker is back, the sender asks it about the forks that were made for it before (`rref.check`), and the receiver
tells which of them have not arrived (`rref.missing`). Those are removed. If such a fork arrives all the same, from
a message that was still to be read, it is late: its receiver has the owner count it anew, as one that another
worker has made.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch

from ..errors import (
    LimitReachedError,
    Outcome,
    RpcError,
    RpcTimeoutError,
    RRefError,
    SendFailedError,
    WorkerLostError,
    WorkerSuspectError,
)
from ..proto.v1 import agent_pb2
from ..rpc.calls.sending import name_of
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import (
    CALL_PARTS,
    RREF_CREATE,
    RREF_FETCH,
    Handler,
    Incoming,
    MessageType,
    Outgoing,
    Request,
)
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from ..rpc.execution.ctrl_c import wait_interruptibly
from ..rpc.execution.futures import Future, error_of
from .handles import CreationCall, Fork, KeepAlive, OwnerHandle, ReferenceExtension, UserHandle
from .owner_table import AwaitedValue, GlobalId, OwnedValue, OwnerTable, ValueServer, id_source, name_needed
from .rref import RRef

__all__ = ["PassedOn", "References"]

MIN_WAITING_TIMEOUT_S = 1.0
"""Seconds: the answer to a creation with a shorter timeout does not wait for other messages."""

MIN_WAITING_CALLS = 1024
"""The smallest bound of calls in flight with which such answers wait: until then, their calls are in flight."""

MAX_ACCEPTING = 1 << 18
"""References that one worker has sent, and of which it has not acknowledged that they are accepted."""

MAX_CHECKED = 1024
"""Forks in one control message."""

MAX_LATE = 1 << 16
"""Forks that are remembered as not arrived; beyond it the first ones are discarded."""


@final
class PassedOn:
    """The forks that this worker has made for others, and those that others have made for it and that were lost.

    Safe to use from any thread.
    """

    def __init__(
        self, agent: RpcAgent, table: OwnerTable, forks: set[Fork], accepting: Mapping[int, set[GlobalId]]
    ) -> None:
        """Registers the handlers of control messages. The sets of forks, arrived and held, are the extension's."""
        self._agent = agent
        self._table = table
        self._forks = forks
        self._accepting = accepting
        self._children: dict[GlobalId, tuple[UserHandle, int]] = {}
        """For each fork of another worker's value: this worker's own handle, kept until the owner has confirmed
        the fork, and the wire id of the worker for which it was made."""
        self._unsure: dict[int, dict[GlobalId, GlobalId]] = {}
        """By wire id, the forks made for each suspect worker before it was, each with its value."""
        self._postponed: set[GlobalId] = set()
        """The forks in messages that wait for suspect workers. They are not lost, whenever they were made."""
        self._late: OrderedDict[GlobalId, None] = OrderedDict()
        """The forks of which this worker has told that they have not arrived."""
        agent.control.on("rref.accept", self._on_accept)
        agent.control.on("rref.check", self._on_check)
        agent.control.on("rref.missing", self._on_missing)

    def __len__(self) -> int:
        """Returns the number of forks of other workers' values that are not confirmed."""
        return len(self._children)

    def add(self, fork: GlobalId, handle: UserHandle, destination: int) -> None:
        """Keeps a handle to another worker's value until a fork of it, made for a worker, is confirmed."""
        self._children[fork] = (handle, destination)

    def remove(self, value: GlobalId, fork: GlobalId, destination: int) -> None:
        """Removes a fork that a worker has not got. Raises RRefError if it was made for another worker."""
        self._postponed.discard(fork)
        child = self._children.get(fork)
        if child is None:
            self._table.remove_fork(value, fork, destination)
        elif child[1] != destination:
            raise RRefError(f"fork {fork} was made for another worker")
        else:
            self._children.pop(fork, None)

    def on_send_aborted(self, message: Outgoing) -> None:
        """Removes the forks of a message that was not sent."""
        for reference, fork in zip(message.envelope.references, self._forks_in(message), strict=True):
            self.remove(GlobalId.from_proto(reference), fork, message.destination.wire_id)

    def on_send_postponed(self, message: Outgoing) -> None:
        """Notes that the forks of a message are not lost, although its receiver does not answer."""
        for fork in self._forks_in(message):
            # Of this and of `on_worker_suspect`, the one that comes last sees what the other one has done.
            self._postponed.add(fork)
            self._unsure.get(message.destination.wire_id, {}).pop(fork, None)

    def on_postponed_sent(self, message: Outgoing) -> None:
        """Notes that the forks of a message, which has been postponed, are on their way."""
        self._postponed.difference_update(self._forks_in(message))

    def is_late(self, fork: GlobalId) -> bool:
        """Returns whether this worker has told that a fork, which arrives now, was lost."""
        return bool(self._late) and self._late.pop(fork, self) is None

    def on_worker_suspect(self, worker: int, below: int) -> None:
        """Notes which forks a worker may not have got: those with smaller numbers than `below`."""
        children = [
            (handle.id, fork) for fork, (handle, other) in self._children.copy().items() if other == worker
        ]
        made = [*children, *self._table.forks_made_here(worker)]
        unsure = {fork: value for value, fork in made if fork.number < below}
        self._unsure[worker] = unsure
        for fork in self._postponed.copy():
            unsure.pop(fork, None)

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Asks a worker which of these it has got."""
        unsure = [(*value, *fork) for fork, value in self._unsure.pop(worker.wire_id, {}).items()]
        for start in range(0, len(unsure), MAX_CHECKED):
            self._agent.control.send(worker, "rref.check", unsure[start : start + MAX_CHECKED])

    def on_worker_lost(self, worker: int) -> None:
        """Removes what is kept until a worker has accepted it."""
        self._unsure.pop(worker, None)
        for fork, (_, destination) in self._children.copy().items():
            if destination == worker:
                self._children.pop(fork, None)

    def clear(self) -> None:
        """Removes everything: the agent has shut down."""
        self._children.clear()
        self._postponed.clear()

    def _forks_in(self, message: Outgoing) -> list[GlobalId]:
        worker = self._agent.info.wire_id
        return [GlobalId((worker, reference.fork)) for reference in message.envelope.references]

    # Control messages.

    def _on_accept(self, sender: WorkerInfo, payload: Any) -> None:
        fork = GlobalId.from_payload(payload)
        _, destination = self._children.get(fork, (None, sender.wire_id))
        if destination != sender.wire_id:
            raise RRefError(f"fork {fork} was not made for {sender.name!r}")
        self._children.pop(fork, None)

    def _on_check(self, sender: WorkerInfo, payload: Any) -> None:
        checked = _checked(payload)
        if any(fork.worker != sender.wire_id for _, fork in checked):
            raise RRefError(f"{sender.name!r} asks for references that it has not made")
        # In this order, as some may arrive meanwhile.
        self._late.update((fork, None) for _, fork in checked)
        arrived = self._accepting[sender.wire_id] | {fork.id for fork in self._forks.copy()}
        missing = []
        for value, fork in checked:
            if fork in arrived:
                self._late.pop(fork, None)
            else:
                missing.append((*value, *fork))
        while len(self._late) > MAX_LATE:
            self._late.popitem(last=False)
        if missing:
            self._agent.control.send(sender, "rref.missing", missing)

    def _on_missing(self, sender: WorkerInfo, payload: Any) -> None:
        for value, fork in _checked(payload):
            self.remove(value, fork, sender.wire_id)


def _is_unsure(error: Exception | None) -> bool:
    """Returns whether a request may have arrived that has failed like this."""
    return isinstance(error, WorkerSuspectError) and error.outcome is not Outcome.NOT_SENT


def _checked(payload: Any) -> Sequence[tuple[GlobalId, GlobalId]]:
    """Returns the values that a message names, each with its fork. Raises ValueError if it is malformed."""
    if not isinstance(payload, list) or len(payload) > MAX_CHECKED:
        raise ValueError("malformed message: it names no references")
    return [GlobalId.pair_from_payload(each) for each in payload]


@final
class References(ReferenceExtension):
    """The references of one worker: those it holds, and those that others hold to its values."""

    control_kinds = ("rref.accept", "rref.await", "rref.check", "rref.delete", "rref.fork", "rref.missing")
    reference_type = RRef
    adds_to_references = True
    adds_if = bool  # never
    header = "created"

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self.table = OwnerTable(agent)
        self.values = ValueServer(agent, self.table)
        self._new_id = id_source(agent.info.wire_id)
        self.forks: set[Fork] = set()
        """The forks that this worker holds."""
        self._accepting: defaultdict[int, set[GlobalId]] = defaultdict(set)
        """By sender, the forks that have arrived and of which it has not acknowledged that they are accepted."""
        self._passed_on = PassedOn(agent, self.table, self.forks, self._accepting)
        self._fork_deleted = threading.Condition()
        """Notified when the owner of a dropped fork has removed it."""
        self._made_before_break: dict[int, int] = {}
        """By worker id, the number below which forks were made before the connection to it broke last."""
        self._releases = False
        """Whether a thread has begun to wait until all forks are deleted."""
        self._is_closed = False
        self._creating: set[GlobalId] = set()
        """The values that `remote` has created here and that something here keeps alive, such as a message."""
        flow = agent.options.flow_control
        self._can_wait = min(flow.max_in_flight, flow.max_total_in_flight) >= MIN_WAITING_CALLS
        agent.control.on("rref.fork", self._on_fork)
        agent.control.on("rref.await", self._on_await)
        agent.control.on("rref.delete", self._on_delete)

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of creations and fetches."""
        return {
            RREF_CREATE: Handler(
                lambda message: self.values.serve_creation(message, message.state[References]),
                user_values=True,
                operation="remote",
                is_quick=True,
                description="RRef creation via remote() on worker",
                on_error=self._fail_creation,
            ),
            RREF_FETCH: Handler(
                self.values.serve_fetch,
                user_values=True,
                cancellable=True,
                operation="to_here",
                description="to_here() of a value on worker",
            ),
        }

    def entry(self, identifier: GlobalId) -> OwnedValue:
        """Returns the entry of a value that this worker owns. Raises RRefError as `OwnerTable.get`."""
        return self.table.get(identifier)

    def own(self, value: Any) -> OwnerHandle:
        """Returns a handle to a value that is given to this worker."""
        entry = self.table.create(self._new_id())
        self.table.mark_created(entry)
        entry.resolve(value)
        return OwnerHandle(self.agent, entry)

    def create(
        self,
        owner: WorkerInfo,
        call: CreationCall,
        timeout: float | None,
        needed: Sequence[GlobalId] = (),
        keep: object = None,
    ) -> OwnerHandle | UserHandle:
        """Runs a call on a worker, which owns the result; returns a handle to it at once."""
        identifier, fork_id = self._new_id(), self._new_id()
        seconds = self.agent.rpc_timeout if timeout is None else timeout

        def add_header(envelope: agent_pb2.Envelope) -> None:
            created = envelope.created
            created.worker_id, created.number = identifier
            created.fork, created.owner = fork_id.number, owner.wire_id
            # Nobody waits for this answer; who does asks for it: see `_confirm_creation`.
            envelope.answer_can_wait = self._can_wait and not 0 < seconds < MIN_WAITING_TIMEOUT_S
            if needed:
                name_needed(needed, envelope)

        request = Request(RREF_CREATE, call, timeout, CALL_PARTS, add_header, keep)
        if owner.wire_id == self.agent.info.wire_id:
            return self._create_here(identifier, fork_id, request)
        fork = Fork(identifier, fork_id, owner, is_creator=True)
        handle = self._handle_of(fork)
        self._creating.add(identifier)
        try:
            request.keep = fork.keep_alive, keep
            fork.creation = self._request_creation(owner, request)
        except BaseException:
            self._remove_fork(fork)
            raise
        # Of a message that was not sent this is known at once, so that the reference is not passed on.
        fork.creation.call_when_done(lambda done: self._on_created(fork, error_of(done)))
        return handle

    def _create_here(self, identifier: GlobalId, fork_id: GlobalId, request: Request) -> OwnerHandle:
        entry = self.table.create(identifier)
        self.table.add_fork(identifier, fork_id, self.agent.info.wire_id)  # keeps the entry until the call has run

        def on_done(done: torch.futures.Future[Any]) -> None:
            if (error := error_of(done)) is not None:
                entry.fail(error)
            self.table.remove_fork(identifier, fork_id, self.agent.info.wire_id)

        try:
            creation = self._request_creation(self.agent.info, request)
        except BaseException:
            self.table.remove_fork(identifier, fork_id, self.agent.info.wire_id)
            raise
        creation.add_done_callback(on_done)
        return OwnerHandle(self.agent, entry, creation)

    def _request_creation(self, owner: WorkerInfo, request: Request) -> Future[Any]:
        future = self.agent.request(owner, request)
        call: Any = request.value
        function = call[0]  # not the arguments, which the owner alone keeps
        future.describe = lambda: f"remote {name_of(function)}"
        return future

    def _handle_of(self, fork: Fork) -> UserHandle:
        self.forks.add(fork)
        fork.keep_alive = KeepAlive(self._on_released, fork)
        return UserHandle(self.agent, fork)

    # References in messages.

    def on_send(self, message: Outgoing) -> None:
        """Makes a fork of every reference in a message. Raises RRefError if one cannot be used any more."""
        destination, add_reference = message.destination.wire_id, message.envelope.references.add
        for rref in message.references:
            handle, fork = rref._handle, self._new_id()
            if handle.agent is not self.agent:
                raise RRefError(
                    f"{rref} belongs to an agent that has shut down. Cannot call fork an UserRRef after deletion."
                )
            try:
                handle.check_usable(rref, "fork an UserRRef")
            except RRefError:
                raise
            except Exception as error:  # must not be taken for an error of this message
                raise RRefError(f"{rref} cannot be passed on: {error}") from error
            if isinstance(handle, OwnerHandle):
                self.table.add_fork(handle.id, fork, destination)
            else:
                self._passed_on.add(fork, handle, destination)
            worker, number = handle.id
            add_reference(worker_id=worker, number=number, fork=fork.number, owner=handle.owner.wire_id)

    def on_send_aborted(self, message: Outgoing) -> None:
        """Removes the forks of a message that was not sent."""
        self._passed_on.on_send_aborted(message)

    def on_send_postponed(self, message: Outgoing) -> None:
        """Notes that the forks of a message are not lost, although its receiver does not answer."""
        self._passed_on.on_send_postponed(message)

    def on_postponed_sent(self, message: Outgoing) -> None:
        """Notes that the forks of a message are on their way."""
        self._passed_on.on_postponed_sent(message)

    def wait_before_run(self, envelope: agent_pb2.Envelope) -> list[AwaitedValue]:
        """Returns the values that a request needs, and those whose creating messages are yet to come."""
        return self.values.awaited_by(envelope)

    def on_receive(self, message: Incoming) -> None:
        """Accepts the forks of a message, whether or not it can be unpickled afterwards."""
        refused: RRefError | LimitReachedError | None = None
        for reference in message.envelope.references:
            try:
                message.references.append(RRef._of(self._accept(message.source, reference)))
            except (RRefError, LimitReachedError) as error:
                refused = error
        if message.envelope.HasField("created"):
            message.state[References] = self.values.begin_creation(message)
        if refused is not None:
            raise refused

    def on_decode_error(self, message: Incoming, error: Exception) -> None:
        """Accepts and drops the references of a message that cannot be decoded, so that their owners do not wait.

        A value that the message was to create fails.
        """
        try:
            self.on_receive(message)
        finally:
            if (entry := message.state.get(References)) is not None:
                entry.fail(error)

    def _fail_creation(self, message: Incoming, error: Exception) -> None:
        """Fails the value that a message was to create. There is none if its headers could not be read so far."""
        if (entry := message.state.get(References)) is not None:
            self.values.fail(entry, error)

    def _accept(self, sender: WorkerInfo, reference: agent_pb2.Reference) -> "OwnerHandle | UserHandle":
        identifier = GlobalId((reference.worker_id, reference.number))
        fork_id = GlobalId((sender.wire_id, reference.fork))
        accepting = self._accepting[sender.wire_id]
        if fork_id in accepting or len(accepting) >= MAX_ACCEPTING:
            problem = f"malformed reference {identifier}: fork {fork_id} is one too many"
            raise LimitReachedError(problem, f"MAX_ACCEPTING={MAX_ACCEPTING}")
        if reference.owner == self.agent.info.wire_id:
            return self._accept_as_owner(sender, identifier, fork_id)
        if not self.agent.is_member(reference.owner):  # it has joined just now; the sender need not wait
            self._tell_accepted(sender, fork_id)
            raise RRefError(f"{self.agent.info.name!r} does not know the owner of {identifier} yet")
        owner = self.agent.incarnation(reference.owner)
        fork = Fork(identifier, fork_id, owner)
        self.forks.add(fork)  # before it is looked whether it is late
        fork.is_confirmed = sender.wire_id == reference.owner and not self._passed_on.is_late(fork_id)
        if not fork.is_confirmed:
            accepting.add(fork_id)

            def on_registered(error: Exception | None) -> None:
                self._confirm(fork, error)
                self._tell_accepted(sender, fork_id)

            payload = (*identifier, *fork_id)
            self.agent.control.send(owner, "rref.fork", payload, on_registered, urgent=False)
        return self._handle_of(fork)

    def _accept_as_owner(self, sender: WorkerInfo, identifier: GlobalId, fork_id: GlobalId) -> OwnerHandle:
        try:
            entry = self.table.get(identifier)
            self.table.note_handle(entry)
        except RRefError as error:  # lost with the worker that had it first; raised on use
            entry = OwnedValue(identifier)
            entry.fail(error)
        if sender.wire_id == self.agent.info.wire_id:
            self.table.remove_fork(identifier, fork_id, sender.wire_id)
        else:
            self._tell_accepted(sender, fork_id)
        return OwnerHandle(self.agent, entry)

    def _tell_accepted(self, sender: WorkerInfo, fork: GlobalId) -> None:
        accepting = self._accepting[sender.wire_id]
        accepting.add(fork)
        self.agent.control.send(
            sender, "rref.accept", tuple(fork), lambda _: accepting.discard(fork), urgent=False
        )

    def _on_released(self, fork: Fork) -> None:
        """Drops a fork. Called by finalizers: takes no lock."""
        fork.is_dropped = True
        if fork.is_creator:
            self._creating.discard(fork.reference)
        self._delete_if_due(fork)

    def _on_created(self, fork: Fork, error: Exception | None) -> None:
        """Handles the end of the request that creates a value."""
        if _is_unsure(error):
            self._creating.discard(fork.reference)  # if it has not arrived, it will not
            fork.creation = None  # whose answer will not come
            self._ask_to_count(fork, partial(self._confirm, fork))
        else:
            is_unsent = isinstance(error, RpcError) and error.outcome is Outcome.NOT_SENT
            if is_unsent and isinstance(error, WorkerLostError | SendFailedError):
                self._creating.discard(fork.reference)
            elif is_unsent or (error is not None and fork.is_doubtful):
                self._withdraw_creation(fork)
            self._confirm(fork, error)

    def _withdraw_creation(self, fork: Fork) -> None:
        """Has the owner ask again for a creation that has failed and will not arrive, if it waits for it."""
        self._creating.discard(fork.reference)
        self._ask_to_count(fork)

    def _ask_to_count(self, fork: Fork, on_counted: Callable[[Exception | None], None] | None = None) -> None:
        """Has the owner count a fork, and ask again for the creation if it waits for that."""
        payload = (*fork.reference, *fork.id)
        self.agent.control.send(fork.owner, "rref.fork", payload, on_counted, urgent=False)

    def _confirm(self, fork: Fork, error: Exception | None) -> None:
        """Handles the owner's answer: it has counted the fork, or never will."""
        fork.settle(error)
        self._delete_if_due(fork)

    def _fail_unconfirmed(self) -> None:
        """Fails the forks that are not confirmed, because the agent has shut down."""
        for fork in list(self.forks):  # messages that arrived before may still add some
            if not fork.is_confirmed and fork.error is None:
                fork.settle(RRefError(f"worker {self.agent.info.name!r} has shut down its RPC agent"))

    def _delete_if_due(self, fork: Fork) -> None:
        """Has the owner told of a dropped fork that is confirmed, or never will be. No lock; may be repeated."""
        if not fork.is_dropped or not (fork.is_confirmed or fork.error):
            return
        # The owner has counted the fork of a creation that was sent, even if it failed: the request has ended by
        # now. Any other fork that is not confirmed needs no deleting.
        was_sent = fork.is_creator and not isinstance(fork.error, WorkerLostError | SendFailedError)
        if fork.is_confirmed or was_sent:
            try:
                fork.deletion.pop()
            except IndexError:  # another thread has told the owner
                return
            payload = (*fork.reference, *fork.id)
            removed = lambda _error: self._remove_fork(fork)  # noqa: E731
            self.agent.control.send(fork.owner, "rref.delete", payload, removed, urgent=False)
        else:
            self.agent.control.run(partial(self._remove_fork, fork), urgent=False)

    def _remove_fork(self, fork: Fork) -> None:
        self.forks.discard(fork)
        if self._releases:  # in this order: `release_all` looks at the forks after it has set this
            with self._fork_deleted:
                self._fork_deleted.notify_all()

    def _on_fork(self, sender: WorkerInfo, payload: Any) -> None:
        value, fork_id = GlobalId.pair_from_payload(payload)
        self.table.ask_creator(self.table.add_fork(value, fork_id, sender.wire_id))

    def _on_await(self, sender: WorkerInfo, payload: Any) -> None:
        if (identifier := GlobalId.from_payload(payload)) not in self._creating:
            raise RRefError(f"reference {identifier} is gone: {sender.name!r} has deleted the value")

    def _on_delete(self, sender: WorkerInfo, payload: Any) -> None:
        self.table.remove_fork(*GlobalId.pair_from_payload(payload), sender.wire_id)

    def release_all(self, timeout: float) -> None:
        """Deletes all forks that this worker holds, and waits until their owners have removed them.

        Raises RpcTimeoutError if an owner has not acknowledged that within `timeout` seconds.
        """
        for fork in list(self.forks):
            fork.keep_alive = None
        with self._fork_deleted:
            self._releases = True
            if not wait_interruptibly(
                self._fork_deleted.wait_for, lambda: self._is_closed or not self.forks, timeout
            ):
                owners = sorted({fork.owner.name for fork in list(self.forks)})
                raise RpcTimeoutError(", ".join(owners), timeout, "deleting references to values of")

    def note_suspect(self, worker: WorkerInfo, reason: str) -> None:  # noqa: ARG002
        """Notes which forks were made before."""
        self._made_before_break[worker.wire_id] = self._new_id().number

    def on_worker_suspect(self, worker: WorkerInfo, _reason: str) -> None:
        """Notes which references, and creations, a suspect worker may not have got."""
        below = self._made_before_break.get(worker.wire_id, self._new_id().number)
        self._passed_on.on_worker_suspect(worker.wire_id, below)
        for fork in self.forks.copy():
            is_creator = fork.is_creator and fork.owner.wire_id == worker.wire_id and fork.id.number < below
            if is_creator and not fork.is_confirmed:
                fork.is_doubtful = True  # of this and of `_on_created`, the one that comes last sees the other
                if fork.error is not None and fork.reference in self._creating:
                    self._withdraw_creation(fork)

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Finds out which of them it has not got."""
        self._passed_on.on_worker_back(worker)

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Removes the forks of a lost worker, and what is kept until it has accepted others."""
        self.table.remove_worker(worker.wire_id, end.reason)
        self._passed_on.on_worker_lost(worker.wire_id)

    def live_objects(self) -> Mapping[str, int]:
        """Returns counts of references: held by others to values of this worker, held by it, and passed on."""
        return {
            "num_owner_rrefs": len(self.table),
            "num_forks": self.table.fork_count(),
            "num_awaited_rrefs": self.table.awaited_count(),
            "num_user_rrefs": len(self.forks),
            "num_pending_users": sum(not (f.is_confirmed or f.error) for f in list(self.forks)),
            "num_pending_children": len(self._passed_on),
            "num_pending_futures": self.agent.control.pending(),
        }

    def close(self) -> None:
        """Drops all values, and ends all waiting for values, confirmations and releases."""
        with self._fork_deleted:
            self._is_closed = True
            self._fork_deleted.notify_all()
        self.agent.control.run(self._fail_unconfirmed)
        self.table.clear(WorkerLostError(self.agent.info.name, "it has shut down its RPC agent"))
        self._passed_on.clear()
