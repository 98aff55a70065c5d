"""Large payloads that several workers are to get, broadcast by a process group of theirs and the sender's.

The sender makes a group for each set of receivers, when it first sends to them. Each message names a payload as
the n-th broadcast of a group, so the members agree on the order, and each takes part on a thread of its own.

No payload depends on the group alone. A message also names a transfer by chunks that is not begun, and a receiver
whom a broadcast has not reached, for whatever reason, asks for those.
"""

import asyncio
import itertools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, final

from ....c10d.group_membership import GroupSpec
from ....c10d.torch_types import TorchStore
from ....errors import GroupAbortedError
from ....proto.v1 import agent_pb2
from ...contracts.control import ControlMessages
from ...contracts.messages import Buffer
from ...contracts.options import BroadcastOptions, ChannelOptions
from ...contracts.worker import WorkerInfo
from ..base import Channel, Start
from .receiving import ReceivingGroup
from .sending import Broadcast, SendingGroup

__all__ = ["BroadcastChannel", "BroadcastDependencies"]

MISSED = "broadcast.missed"
ENDED = "broadcast.ended"
CONTROL_KINDS = (ENDED, MISSED)
"""Kinds of control messages: to the sender and from it."""

MAX_RECEIVING_GROUPS = 256
"""Of how many groups of one sender a worker takes part at most; of others it gets everything by chunks."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastDependencies:
    """What broadcasts need of an agent.

    store: where groups meet.
    control: tells of their ends.
    worker: finds workers by id.
    sent_again: is called with the bytes of payloads that were not broadcast after all.
    """

    store: TorchStore
    control: ControlMessages
    worker: Callable[[int], WorkerInfo]
    sent_again: Callable[[int], None]


@final
class BroadcastChannel:
    """All groups that one agent broadcasts to, or takes part in."""

    name: ClassVar[str] = "broadcast"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        me: int,
        chunked: Channel,
        limits: ChannelOptions,
        options: BroadcastOptions,
    ) -> None:
        self._loop = loop
        self._me = me
        self._chunked = chunked
        self._limits = limits
        self._options = options
        self._dependencies: BroadcastDependencies | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sending: OrderedDict[tuple[int, ...], SendingGroup] = OrderedDict()
        """By receivers; that used last is the last."""
        self._alive: weakref.WeakValueDictionary[int, SendingGroup] = weakref.WeakValueDictionary()
        """By number; those too to which nothing more is sent, as long as somebody may ask for chunks."""
        self._unformable: set[tuple[int, ...]] = set()
        """Receivers with whom no group has come together."""
        self._receiving: dict[tuple[int, int], ReceivingGroup] = {}
        """By sender and number. Touched on the loop only."""

    def open(self, dependencies: BroadcastDependencies) -> None:
        """Before this, which is called once, nothing is broadcast."""
        self._dependencies = dependencies
        dependencies.control.on(MISSED, lambda receiver, what: self._missed(receiver.id, *what))
        dependencies.control.on(ENDED, self._tell_ended)

    # Sending: from any thread.

    def broadcast(self, receivers: Collection[int]) -> Broadcast | None:
        """What the messages of a call to these workers are to share; None if that is nothing.

        The caller says `sent` to it in the end.
        """
        others = tuple(sorted(set(receivers) - {self._me}))
        if self._dependencies is None or not self._options.enabled or len(others) < 2:
            return None
        return Broadcast(others, self._options.threshold, self._acquire)

    def _acquire(self, receivers: tuple[int, ...]) -> SendingGroup | None:
        """The group for these receivers; None if it cannot be."""
        assert self._dependencies is not None
        with self._lock:
            group = self._sending.get(receivers)
            if group is None or not group.acquire():
                if receivers in self._unformable:
                    return None
                group = self._make_group(receivers, self._dependencies)
                group.acquire()
            self._sending.move_to_end(receivers)
            return group

    def _make_group(self, receivers: tuple[int, ...], dependencies: BroadcastDependencies) -> SendingGroup:
        for others, group in list(self._sending.items()):
            if len(self._sending) >= self._options.max_groups and group.finish():
                del self._sending[others]
        number = next(self._numbers)
        control = dependencies.control
        group = self._sending[receivers] = self._alive[number] = SendingGroup(
            number,
            _group_spec(dependencies.store, number, (self._me, *receivers), self._me),
            chunked=self._chunked,
            over=self._over,
            tell_end=lambda to, *what: control.send(dependencies.worker(to), ENDED, what),
            sent_again=dependencies.sent_again,
        )
        return group

    def _over(self, group: SendingGroup, formed: bool, error: Exception | None) -> None:
        """A group to which this worker sends has come to its end. Called on the group's thread."""
        if error is None:
            return
        with self._lock:
            if self._sending.get(group.receivers) is group:
                del self._sending[group.receivers]
            if not formed and not isinstance(error, GroupAbortedError):
                self._unformable.add(group.receivers)
                log.warning(
                    "worker %d cannot form a process group with workers %s, so what it sends to all of them goes "
                    "to each by itself: %s",
                    self._me,
                    ", ".join(map(str, group.receivers)),
                    error,
                )
        group.break_off()

    def _missed(self, receiver: int, number: int, first: int) -> None:
        """A receiver has not got the broadcasts of a group from one on."""
        if (group := self._alive.get(number)) is not None:
            group.missed(receiver, first)

    @property
    def groups(self) -> int:
        """How many groups there are in which this worker broadcasts, or takes part."""
        return len(self._sending) + len(self._receiving)

    def stop(self) -> None:
        """Ends all groups, and waits for their threads. Not called on the loop."""
        with self._lock:
            sending = list(self._sending.values())
            self._sending.clear()
        for group in sending:
            group.close()
        for taking_part in list(self._receiving.values()):
            taking_part.close()

    # Receiving, and what else channels do: on the loop.

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, Start | None]:
        """What goes to one peer goes by chunks."""
        return self._chunked.send(peer, data)

    def receive(self, peer: int, payload: agent_pb2.Payload) -> "asyncio.Future[Buffer] | Buffer":
        """A future of the bytes."""
        announced = payload.broadcast
        if not 0 < announced.nbytes <= self._limits.max_payload_bytes:
            raise ValueError(
                f"a payload of {announced.nbytes} bytes is refused: "
                f"max_payload_bytes is {self._limits.max_payload_bytes}"
            )
        return self._group_of(peer, announced).receive(announced)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Takes no part in this broadcast, and so no more in its group."""
        self._group_of(peer, payload.broadcast).discard(payload.broadcast)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """The others wait for this one to take part."""
        return False

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Is not possible."""

    def drop(self, peer: int, reason: str) -> None:
        """Ends the groups that a peer is in."""
        for key in [key for key in self._receiving if key[0] == peer]:
            self._receiving.pop(key).drop(reason)
        with self._lock:
            broken = [group for receivers, group in self._sending.items() if peer in receivers]
            for group in broken:
                del self._sending[group.receivers]
        for group in broken:
            group.break_off()

    async def close(self) -> None:
        """Nothing more comes."""
        for key in list(self._receiving):
            self._receiving.pop(key).drop("this worker shuts down")

    def _group_of(self, peer: int, announced: agent_pb2.BroadcastPayload) -> ReceivingGroup:
        key = (peer, announced.group)
        group = self._receiving.get(key)
        if group is None:
            dependencies = self._dependencies
            if dependencies is None:
                raise ValueError("a broadcast payload is refused: this worker takes part in no groups")
            members = tuple(announced.members)
            spec = None
            known = len(set(members)) == len(members) and members[:1] == (peer,) and self._me in members[1:]
            if known and sum(sender == peer for sender, _ in self._receiving) < MAX_RECEIVING_GROUPS:
                spec = _group_spec(dependencies.store, announced.group, members, self._me)
            group = self._receiving[key] = ReceivingGroup(
                peer,
                self._loop,
                spec,
                self._chunked,
                lambda first: dependencies.control.send(
                    dependencies.worker(peer), MISSED, (announced.group, first)
                ),
                lambda: self._forget(key),
            )
        return group

    def _forget(self, key: tuple[int, int]) -> None:
        self._receiving.pop(key, None)

    def _tell_ended(self, sender: WorkerInfo, what: tuple[int, bool]) -> None:
        self._loop.call_soon_threadsafe(self._ended, sender.id, *what)

    def _ended(self, sender: int, number: int, broken: bool) -> None:
        """A sender says that it uses a group no more."""
        group = self._receiving.get((sender, number))
        if group is None:
            return
        if broken:
            group.break_off()
        group.finish()


def _group_spec(store: TorchStore, number: int, members: tuple[int, ...], me: int) -> GroupSpec:
    return GroupSpec(store, f"broadcast-{members[0]}-{number}", members, me)
