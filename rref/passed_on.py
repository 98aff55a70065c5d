"""The references that a worker has put into messages to others, until the receivers have them.

A message that was on its way when its connection broke may be lost, with its references. So when a suspect
worker is back, the sender asks it about the forks that were made for it before (`rref.check`), and the receiver
tells which of them have not arrived (`rref.missing`). Those are removed. If such a fork arrives all the same, from
a message that was still to be read, it is late: its receiver has the owner count it anew, as one that another
worker has made.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from ..errors import Outcome, RRefError, WorkerSuspectError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import Outgoing
from ..rpc.contracts.worker import WorkerInfo
from .handles import Fork, UserHandle
from .ids import GlobalId
from .owner_table import OwnerTable

__all__ = ["PASSED_ON_KINDS", "PassedOn", "is_unsure"]

PASSED_ON_KINDS = ("rref.accept", "rref.check", "rref.missing")
"""The kinds of control messages about references in messages."""

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

    def make_sure(self, fork: Fork, on_settled: Callable[[Exception | None], None]) -> None:
        """Has the owner count the fork of a creation, if it has arrived: its answer will not."""
        fork.creation = None
        payload = (*fork.reference, *fork.id)
        self._agent.control.send(fork.owner, "rref.fork", payload, on_settled, urgent=False)

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


def is_unsure(error: Exception | None) -> bool:
    """Returns whether a request may have arrived that has failed like this."""
    return isinstance(error, WorkerSuspectError) and error.outcome is not Outcome.NOT_SENT


def _checked(payload: Any) -> Sequence[tuple[GlobalId, GlobalId]]:
    """Returns the values that a message names, each with its fork. Raises ValueError if it is malformed."""
    if not isinstance(payload, list) or len(payload) > MAX_CHECKED:
        raise ValueError("malformed message: it names no references")
    return [GlobalId.pair_from_payload(each) for each in payload]
