"""Large payloads that go to several workers at once, by the broadcast of a process group.

Workers of one host share memory instead: see shared_memory/broadcast.py.

The sender makes a group for each set of receivers when it first sends to them. Each message names a payload as the
n-th broadcast of a group, so that the members agree on the order; each takes part on a thread of its own.

No payload depends on the group alone. A message also names a transfer by chunks that has not been started, and a
receiver that a broadcast has not reached, for whatever reason, requests these chunks.
"""

import itertools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import final

from ....c10d.groups.membership import GroupSpec
from ....c10d.torch_types import TorchStore
from ....errors import GroupAbortedError
from ...contracts.agent import ControlMessages
from ...contracts.options import BroadcastOptions
from ...contracts.worker import WorkerInfo
from ..shared_memory.broadcast import SegmentBroadcast
from ..shared_memory.memory import SharedMemory
from .sending import Broadcast, BroadcastPeer, SendingGroup

__all__ = ["CONTROL_KINDS", "BroadcastDependencies", "Broadcasts"]

RESEND = "broadcast.resend"
"""The control message by which a receiver requests chunks: the group's number, and that of the first broadcast."""

ENDED = "broadcast.ended"
"""The control message by which a sender ends a group: the group's number, and whether it was aborted."""

CONTROL_KINDS = (ENDED, RESEND)
"""All kinds of control messages of broadcasts."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastDependencies:
    """What broadcasts need from an agent.

    store: the store through which the members of a group find each other.
    control: carries the messages between senders and receivers.
    peer: returns the channels of a worker.
    on_resend: called with the bytes of each payload that is sent by chunks after all.
    may_form: returns whether workers may form a process group, by their ids.
    insecure: whether groups may connect workers on several hosts without credentials.
    """

    store: TorchStore
    control: ControlMessages
    peer: Callable[[WorkerInfo], BroadcastPeer]
    on_resend: Callable[[int], None]
    may_form: Callable[[Collection[int]], bool]
    insecure: bool = False


@final
class Broadcasts:
    """All groups in which one agent broadcasts."""

    def __init__(self, me: WorkerInfo, memory: SharedMemory, options: BroadcastOptions) -> None:
        """Forms no group before `open`."""
        self._me = me
        self._memory = memory
        self._options = options
        self._dependencies: BroadcastDependencies | None = None
        self._lock = threading.Lock()
        """Guards `_groups` and `_unformable`."""
        self._numbers = itertools.count()
        self._groups: OrderedDict[tuple[BroadcastPeer, ...], SendingGroup] = OrderedDict()
        """Those that can be used, by receivers; the most recently used group is the last one."""
        self._by_number: weakref.WeakValueDictionary[int, SendingGroup] = weakref.WeakValueDictionary()
        """All groups, also those that have ended, as long as a receiver may request chunks."""
        self._unformable: set[tuple[BroadcastPeer, ...]] = set()
        """Receivers with whom forming a group has failed."""

    def open(self, dependencies: BroadcastDependencies) -> None:
        """Starts to broadcast, and to take part in groups. Called once."""
        self._dependencies = dependencies
        dependencies.control.on(RESEND, self._on_resend_request)
        dependencies.control.on(ENDED, self._on_ended)

    @property
    def groups(self) -> int:
        """The number of groups in which this worker broadcasts."""
        return len(self._groups)

    # Sending: from any thread.

    def suits(self, count: int, nbytes: int) -> bool:
        """Returns whether a message of so many bytes to so many workers may share payloads."""
        return self._options.enabled and count > 1 and nbytes >= self._options.threshold

    def unconnected(self, receivers: Collection[BroadcastPeer]) -> Collection[BroadcastPeer]:
        """Returns the workers that could share payloads in memory, if they were connected."""
        others = self._others(receivers)
        if len(others) < 2:
            return ()
        return [each for each in others if each.shared_memory.may_connect and not each.shared_memory.is_connected]

    def broadcast(self, receivers: Collection[BroadcastPeer]) -> Broadcast | None:
        """Returns what messages to these workers share, which the caller releases; None if there are too few."""
        others = self._others(receivers)
        if len(others) < 2:
            return None
        distant = tuple(each for each in others if not each.shared_memory.may_connect)
        group = distant if len(distant) > 1 and self._may_form(distant) else ()
        segments = SegmentBroadcast.to(self._memory, [each.shared_memory for each in others])
        if not group and segments is None:
            return None
        return Broadcast(group, self._options.threshold, self._acquire, segments)

    def _others(self, receivers: Collection[BroadcastPeer]) -> Sequence[BroadcastPeer]:
        others = {each.info.wire_id: each for each in receivers if each.info.wire_id != self._me.wire_id}
        return [others[number] for number in sorted(others)]

    def _may_form(self, receivers: tuple[BroadcastPeer, ...]) -> bool:
        dependencies = self._dependencies
        return dependencies is not None and dependencies.may_form(self._members(receivers))

    def _members(self, receivers: tuple[BroadcastPeer, ...]) -> tuple[int, ...]:
        return (self._me.wire_id, *(each.info.wire_id for each in receivers))

    def _acquire(self, receivers: tuple[BroadcastPeer, ...]) -> SendingGroup | None:
        """Acquires the group for these receivers, and makes it if there is none; None if it cannot be formed."""
        assert self._dependencies is not None
        with self._lock:
            group = self._groups.get(receivers)
            if group is None or not group.acquire():
                if receivers in self._unformable:
                    return None
                group = self._make_group(receivers, self._dependencies)
                group.acquire()
            self._groups.move_to_end(receivers)
            return group

    def _make_group(
        self, receivers: tuple[BroadcastPeer, ...], dependencies: BroadcastDependencies
    ) -> SendingGroup:
        """Makes a group, and ends the least recently used ones beyond `max_groups`. Called with the lock."""
        for others, group in list(self._groups.items()):
            if len(self._groups) >= self._options.max_groups and group.finish():
                del self._groups[others]
        number = next(self._numbers)
        control = dependencies.control
        group = self._groups[receivers] = self._by_number[number] = SendingGroup(
            number,
            self._spec(dependencies, number, self._members(receivers)),
            receivers,
            on_end=self._on_group_end,
            send_ended=lambda to, *payload: control.send(to.info, ENDED, payload),
            on_resend=dependencies.on_resend,
        )
        return group

    def _spec(self, dependencies: BroadcastDependencies, number: int, members: tuple[int, ...]) -> GroupSpec:
        name = f"broadcast-{members[0]}-{number}"
        return GroupSpec(dependencies.store, name, members, self._me.wire_id, insecure=dependencies.insecure)

    def _on_group_end(self, group: SendingGroup, has_formed: bool, error: Exception | None) -> None:
        """Handles the end of a group in which this worker broadcasts. Runs on the group's thread."""
        if error is None:
            return
        with self._lock:
            if self._groups.get(group.receivers) is group:
                del self._groups[group.receivers]
            if not has_formed and not group.forms_again and not isinstance(error, GroupAbortedError):
                self._unformable.add(group.receivers)
                log.warning(
                    "worker %s cannot form a process group with workers %s, and sends payloads to each of them "
                    "instead of broadcasting: %s",
                    self._me.name,
                    ", ".join(each.info.name for each in group.receivers),
                    error,
                )
        group.abort()

    def _on_resend_request(self, worker: WorkerInfo, payload: tuple[int, int]) -> None:
        """Handles RESEND. Runs on a thread of the executor."""
        assert self._dependencies is not None
        number, first = payload
        if (group := self._by_number.get(number)) is not None:
            receiver = self._dependencies.peer(worker)
            if receiver not in group.receivers or type(first) is not int:
                raise ValueError(f"{worker.name!r} does not receive broadcasts of group {number}")
            group.resend(receiver, first)

    # Receiving.

    def join(self, sender: WorkerInfo, number: int, members: tuple[int, ...]) -> GroupSpec | None:
        """Returns the group that a sender names; None if it is malformed, or may not be formed.

        Raises ValueError if this worker takes part in no groups.
        """
        if (dependencies := self._dependencies) is None:
            raise ValueError("a broadcast payload is refused: this worker takes part in no groups")
        me = self._me.wire_id
        is_sound = len(set(members)) == len(members) and members[:1] == (sender.wire_id,) and me in members[1:]
        if not is_sound or not dependencies.may_form(members):
            return None
        return self._spec(dependencies, number, members)

    def request_chunks(self, sender: WorkerInfo, number: int, first: int) -> None:
        """Asks the sender of a group for chunks of a broadcast and all later ones."""
        assert self._dependencies is not None
        self._dependencies.control.send(sender, RESEND, (number, first))

    def _on_ended(self, sender: WorkerInfo, payload: tuple[int, bool]) -> None:
        """Handles ENDED. Runs on a thread of the executor."""
        assert self._dependencies is not None
        number, was_aborted = payload
        if type(number) is not int or type(was_aborted) is not bool:
            raise ValueError("malformed message: it ends no group of broadcasts")
        self._dependencies.peer(sender).on_group_ended(number, was_aborted=was_aborted)

    # The end.

    def drop(self, receiver: BroadcastPeer, *, is_lost: bool) -> None:
        """Ends the groups that a worker belongs to, which is lost, or whose connection broke."""
        with self._lock:
            if is_lost:
                self._unformable = {each for each in self._unformable if receiver not in each}
            affected = [group for receivers, group in self._groups.items() if receiver in receivers]
            for group in affected:
                del self._groups[group.receivers]
        for group in affected:
            group.abort(forms_again=True)

    def stop(self) -> None:
        """Ends all groups, and waits for their threads. Must not be called on the loop."""
        with self._lock:
            sending = list(self._groups.values())
            self._groups.clear()
        for group in sending:
            group.close()
