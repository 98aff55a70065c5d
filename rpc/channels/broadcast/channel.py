"""The channel for large payloads that go to several workers at once, by the broadcast of a process group.

Workers of one host share memory instead: see shared_memory/broadcast.py.

The sender makes a group for each set of receivers when it first sends to them. Each message names a payload as the
n-th broadcast of a group, so that the members agree on the order; each takes part on a thread of its own.

No payload depends on the group alone. A message also names a transfer by chunks that has not been started, and a
receiver that a broadcast has not reached, for whatever reason, requests these chunks.
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
from ...contracts.collective_options import BroadcastOptions
from ...contracts.control import ControlMessages
from ...contracts.messages import Buffer
from ...contracts.options import ChannelOptions
from ...contracts.worker import WorkerInfo
from ..base import Arriving, PayloadLostError, SendingChannel, StartTransfer
from ..shared_memory.channel import SharedMemoryChannel
from .receiving import ReceivingGroup
from .sending import Broadcast, SendingGroup

__all__ = ["BroadcastChannel", "BroadcastDependencies"]

RESEND = "broadcast.resend"
"""The control message by which a receiver requests chunks: the group's number, and that of the first broadcast."""

ENDED = "broadcast.ended"
"""The control message by which a sender ends a group: the group's number, and whether it was aborted."""

CONTROL_KINDS = (ENDED, RESEND)
"""All kinds of control messages of broadcasts."""

MAX_RECEIVING_GROUPS = 256
"""Groups of one sender that a worker takes part in; what is broadcast in further ones it receives by chunks."""

MAX_GROUPS = 16 * MAX_RECEIVING_GROUPS
"""Groups of one sender that a worker knows; what is broadcast in further ones is refused."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastDependencies:
    """What broadcasts need from an agent.

    store: the store through which the members of a group find each other.
    control: carries the messages between senders and receivers.
    worker: returns the worker with an id.
    on_resend: called with the bytes of each payload that is sent by chunks after all.
    may_form: returns whether workers may form a process group, by their ids.
    insecure: whether groups may connect workers on several hosts without credentials.
    """

    store: TorchStore
    control: ControlMessages
    worker: Callable[[int], WorkerInfo]
    on_resend: Callable[[int], None]
    may_form: Callable[[Collection[int]], bool]
    insecure: bool = False


@final
class BroadcastChannel:
    """All groups in which one agent broadcasts, or takes part."""

    name: ClassVar[str] = "broadcast"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        me: int,
        chunked: SendingChannel,
        shared_memory: SharedMemoryChannel,
        limits: ChannelOptions,
        options: BroadcastOptions,
    ) -> None:
        """Forms no group before `open`.

        Args:
            loop: the agent's event loop.
            me: the id of this worker.
            chunked: carries payloads that are not broadcast after all.
            shared_memory: shares payloads among workers of this host.
            limits: the size of the largest payload that is received.
            options: whether, and from which size on, payloads are broadcast.
        """
        self._loop = loop
        self._me = me
        self._chunked = chunked
        self._shared_memory = shared_memory
        self._limits = limits
        self._options = options
        self._dependencies: BroadcastDependencies | None = None
        self._lock = threading.Lock()
        """Guards `_sending` and `_unformable`."""
        self._numbers = itertools.count()
        self._sending: OrderedDict[tuple[int, ...], SendingGroup] = OrderedDict()
        """Groups that can be used, by receivers; the most recently used group is the last one."""
        self._by_number: weakref.WeakValueDictionary[int, SendingGroup] = weakref.WeakValueDictionary()
        """All groups, also those that have ended, as long as a receiver may request chunks."""
        self._unformable: set[tuple[int, ...]] = set()
        """Receivers with whom forming a group has failed."""
        self._receiving: dict[tuple[int, int], ReceivingGroup] = {}
        """By sender and number. Used on the loop only."""

    def open(self, dependencies: BroadcastDependencies) -> None:
        """Starts to broadcast, and to take part in groups. Called once."""
        self._dependencies = dependencies
        dependencies.control.on(RESEND, self._on_resend_request)
        dependencies.control.on(ENDED, self._on_ended)

    # Sending: from any thread.

    def unconnected(self, receivers: Collection[int], nbytes: int) -> Collection[int]:
        """Returns the workers that could share a payload of a message in memory, if they were connected.

        Args:
            receivers: those of the message.
            nbytes: of all of its payloads.
        """
        others = set(receivers) - {self._me}
        if not self._options.enabled or len(others) < 2 or nbytes < self._options.threshold:
            return ()
        return {
            peer
            for peer in others
            if self._shared_memory.may_connect(peer) and not self._shared_memory.is_connected(peer)
        }

    def broadcast(self, receivers: Collection[int]) -> Broadcast | None:
        """Returns what messages to these workers share, which the caller releases; None if there are too few."""
        others = sorted(set(receivers) - {self._me})
        if not self._options.enabled or len(others) < 2:
            return None
        distant = tuple(peer for peer in others if not self._shared_memory.may_connect(peer))
        group = distant if len(distant) > 1 and self._may_form(distant) else ()
        segments = self._shared_memory.broadcast(others)
        if not group and segments is None:
            return None
        return Broadcast(group, self._options.threshold, self._acquire, segments)

    def _may_form(self, receivers: tuple[int, ...]) -> bool:
        return self._dependencies is not None and self._dependencies.may_form((self._me, *receivers))

    def _acquire(self, receivers: tuple[int, ...]) -> SendingGroup | None:
        """Acquires the group for these receivers, and makes it if there is none; None if it cannot be formed."""
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
        """Makes a group, and ends the least recently used ones beyond `max_groups`. Called with the lock."""
        for others, group in list(self._sending.items()):
            if len(self._sending) >= self._options.max_groups and group.finish():
                del self._sending[others]
        number = next(self._numbers)
        control = dependencies.control
        group = self._sending[receivers] = self._by_number[number] = SendingGroup(
            number,
            _group_spec(dependencies, number, (self._me, *receivers), self._me),
            chunked=self._chunked,
            on_end=self._on_group_end,
            send_ended=lambda to, *payload: control.send(dependencies.worker(to), ENDED, payload),
            on_resend=dependencies.on_resend,
        )
        return group

    def _on_group_end(self, group: SendingGroup, has_formed: bool, error: Exception | None) -> None:
        """Handles the end of a group in which this worker broadcasts. Runs on the group's thread."""
        if error is None:
            return
        with self._lock:
            if self._sending.get(group.receivers) is group:
                del self._sending[group.receivers]
            if not has_formed and not group.forms_again and not isinstance(error, GroupAbortedError):
                self._unformable.add(group.receivers)
                log.warning(
                    "worker %d cannot form a process group with workers %s, and sends payloads to each of them "
                    "instead of broadcasting: %s",
                    self._me,
                    ", ".join(map(str, group.receivers)),
                    error,
                )
        group.abort()

    def _on_resend_request(self, receiver: WorkerInfo, payload: tuple[int, int]) -> None:
        """Handles RESEND. Runs on a thread of the executor."""
        number, first = payload
        if (group := self._by_number.get(number)) is not None:
            if receiver.wire_id not in group.receivers or type(first) is not int:
                raise ValueError(f"{receiver.name!r} does not receive broadcasts of group {number}")
            group.resend(receiver.wire_id, first)

    @property
    def groups(self) -> int:
        """The number of groups in which this worker broadcasts, or takes part."""
        return len(self._sending) + len(self._receiving)

    def stop(self) -> None:
        """Ends all groups, and waits for their threads. Must not be called on the loop."""
        with self._lock:
            sending = list(self._sending.values())
            self._sending.clear()
        for group in sending:
            group.close()
        for receiving in list(self._receiving.values()):
            receiving.close()

    # The contract of channels. All but `send` is called on the loop.

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer | None]:
        """Sends by chunks: `broadcast` is for several receivers."""
        return self._chunked.send(peer, data)

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer | Arriving:
        """Takes part in the broadcast, and returns a future of the bytes."""
        announced = payload.broadcast
        if not 0 < announced.nbytes <= self._limits.max_payload_bytes:
            raise ValueError(
                f"a payload of {announced.nbytes} bytes is refused: "
                f"max_payload_bytes is {self._limits.max_payload_bytes}"
            )
        return self._group_of(peer, announced).receive(announced)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Leaves the payload's group, whose other members would wait for this one."""
        announced = payload.broadcast
        if (peer, announced.group) in self._receiving or not self._is_full(peer, MAX_GROUPS):
            self._group_of(peer, announced).discard(announced)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns False: the other receivers depend on this one to take part."""
        return False

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Is never called."""

    def drop_peer(self, peer: int, reason: str) -> None:
        """Ends the groups that a peer belongs to."""
        self._drop(peer, ConnectionError(reason))

    def drop_connection(self, peer: int, reason: str) -> None:
        """Ends the groups that a peer belongs to; others are formed when it is back."""
        self._drop(peer, PayloadLostError(reason))

    def _drop(self, peer: int, error: Exception) -> None:
        for key in [key for key in self._receiving if key[0] == peer]:
            self._receiving.pop(key).fail(error)
        with self._lock:
            affected = [group for receivers, group in self._sending.items() if peer in receivers]
            for group in affected:
                del self._sending[group.receivers]
        for group in affected:
            group.abort(forms_again=True)

    async def close(self) -> None:
        """Fails what is expected; the groups have ended by `stop`."""
        for key in list(self._receiving):
            self._receiving.pop(key).fail(ConnectionError("this worker shuts down"))

    def _group_of(self, peer: int, payload: agent_pb2.BroadcastPayload) -> ReceivingGroup:
        """Returns this worker's part in the group that a sender names, and makes it at the first payload."""
        key = (peer, payload.group)
        group = self._receiving.get(key)
        if group is None:
            dependencies = self._dependencies
            if dependencies is None:
                raise ValueError("a broadcast payload is refused: this worker takes part in no groups")
            if self._is_full(peer, MAX_GROUPS):
                raise ValueError(f"a broadcast payload is refused: its sender has more than {MAX_GROUPS} groups")
            group = self._receiving[key] = ReceivingGroup(
                peer,
                self._loop,
                self._spec_to_join(peer, payload, dependencies),
                self._chunked,
                request_chunks=lambda first: dependencies.control.send(
                    dependencies.worker(peer), RESEND, (payload.group, first)
                ),
                on_removed=lambda: self._remove(key),
            )
        return group

    def _spec_to_join(
        self, peer: int, payload: agent_pb2.BroadcastPayload, dependencies: BroadcastDependencies
    ) -> GroupSpec | None:
        """Returns the group that a sender names; None if it is malformed, one too many, or may not be formed."""
        members = tuple(payload.members)
        is_sound = len(set(members)) == len(members) and members[:1] == (peer,) and self._me in members[1:]
        if not is_sound or self._is_full(peer, MAX_RECEIVING_GROUPS) or not dependencies.may_form(members):
            return None
        return _group_spec(dependencies, payload.group, members, self._me)

    def _is_full(self, peer: int, limit: int) -> bool:
        """Returns whether a sender has as many groups as this."""
        return len(self._receiving) >= limit and sum(sender == peer for sender, _ in self._receiving) >= limit

    def _remove(self, key: tuple[int, int]) -> None:
        self._receiving.pop(key, None)

    def _on_ended(self, sender: WorkerInfo, payload: tuple[int, bool]) -> None:
        """Handles ENDED. Runs on a thread of the executor."""
        number, was_aborted = payload
        if type(number) is not int or type(was_aborted) is not bool:
            raise ValueError("malformed message: it ends no group of broadcasts")
        self._loop.call_soon_threadsafe(self._end_receiving, sender.wire_id, number, was_aborted)

    def _end_receiving(self, sender: int, number: int, was_aborted: bool) -> None:
        group = self._receiving.get((sender, number))
        if group is None:
            return
        if was_aborted:
            group.abort()
        group.finish()


def _group_spec(dependencies: BroadcastDependencies, number: int, members: tuple[int, ...], me: int) -> GroupSpec:
    name = f"broadcast-{members[0]}-{number}"
    return GroupSpec(dependencies.store, name, members, me, insecure=dependencies.insecure)
