"""The channel for large payloads that go to several workers at once, by the broadcast of a process group.

Workers of one host share memory instead: see SegmentBroadcast in shared_memory.py.

The sender makes a group for each set of receivers when it first sends to them. Each message names a payload as the
n-th broadcast of a group, so that the members agree on the order; each takes part on a thread of its own.

No payload depends on the group alone. A message also names a transfer by chunks that has not been started, and a
receiver that a broadcast has not reached, for whatever reason, requests these chunks.
"""

import contextlib
import itertools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, final

import torch

from ...c10d.groups.membership import GroupSpec
from ...c10d.torch_types import TorchStore
from ...errors import GroupAbortedError
from ...proto.v1 import agent_pb2
from ..contracts.agent import ControlMessages
from ..contracts.worker import WorkerInfo
from ..transports.base import Transport
from ..wire.small_tensors import Gathered
from .base import Arriving, ChannelDependencies, ChannelPeer, StartTransfer, check_size
from .broadcast_group import BroadcastGroup
from .chunked import ChunkedChannel
from .shared_memory import SegmentBroadcast, SharedMemory, SharedMemoryChannel, address_and_size

__all__ = [
    "CONTROL_KINDS",
    "Broadcast",
    "BroadcastChannel",
    "BroadcastDependencies",
    "BroadcastPeer",
    "Broadcasts",
]

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

BroadcastPart = tuple[agent_pb2.Payload, StartTransfer | None, bool]
"""A payload's description for a receiver's envelope; what is to be called when that is queued, if anything
remains to be sent; and whether no other receiver's envelope has named the payload yet."""


class BroadcastPeer(Protocol):
    """Another worker that takes part in broadcasts, and its channels."""

    info: WorkerInfo
    chunked: ChunkedChannel
    shared_memory: SharedMemoryChannel
    broadcast: "BroadcastChannel"


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


@dataclass(eq=False, slots=True, weakref_slot=True)
class _SharedPayload:
    """A payload of a call to several workers. Kept alive by the call until all of them have answered."""

    number: int
    """The number of the broadcast in its group."""
    data: memoryview
    chunk_transfers: dict[BroadcastPeer, Callable[[], None]] = field(default_factory=dict)
    """By receiver whose envelope is queued, what starts to send it the payload by chunks."""


@final
class _SendingGroup:
    """A process group of this worker, which broadcasts, and several receivers. Safe to use from any thread.

    Its users acquire the group before they send, and release it when they have sent all envelopes that name its
    broadcasts. It ends by `finish` when it is not used, or by `abort` at any time.
    """

    def __init__(
        self,
        number: int,
        spec: GroupSpec,
        receivers: tuple[BroadcastPeer, ...],
        dependencies: BroadcastDependencies,
        on_end: Callable[["_SendingGroup", bool, Exception | None], None],
    ) -> None:
        """Starts to form the group of this worker, whose groups are numbered, and the receivers, in their order.

        `on_end` takes the group, whether it had formed, and the error that ended it.
        """
        self.number = number
        self.receivers = receivers
        self._members = spec.members
        self._dependencies = dependencies
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._payloads: weakref.WeakValueDictionary[int, _SharedPayload] = weakref.WeakValueDictionary()
        """By number."""
        self._first_missing: dict[BroadcastPeer, int] = {}
        """By receiver that has requested chunks, the number of the first broadcast that it has not received."""
        self._users = 0
        self._ended = False
        self._aborted = False
        self.forms_again = False
        """Whether the group was aborted although its members may form one."""
        self._group = BroadcastGroup(spec, lambda has_formed, error: on_end(self, has_formed, error))
        self._group.start()

    def acquire(self) -> bool:
        """Registers a user. Returns False if the group has ended."""
        with self._lock:
            self._users += not self._ended
            return not self._ended

    def release(self) -> None:
        """Unregisters a user, who has sent all envelopes."""
        with self._lock:
            self._users -= 1
            is_last = self._ended and not self._users
        if is_last:
            self._tell_receivers()

    def start_broadcast(self, data: memoryview) -> _SharedPayload | None:
        """Queues the broadcast of these bytes. Returns None if the group has ended."""
        with self._lock:
            if self._ended:
                return None
            shared = _SharedPayload(next(self._numbers), data)
            self._payloads[shared.number] = shared
            tensor = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
            # With the lock, so that broadcasts are queued in the order of their numbers.
            self._group.put(shared.number, tensor)
        return shared

    def add_receiver(
        self, receiver: BroadcastPeer, shared: _SharedPayload
    ) -> tuple[agent_pb2.Payload, StartTransfer] | None:
        """Describes a broadcast to one receiver; None if the group has ended. See `Broadcast.put`."""
        if self._ended:
            return None
        chunked, start = receiver.chunked.send(shared.data)
        announced = agent_pb2.BroadcastPayload(
            group=self.number,
            number=shared.number,
            nbytes=shared.data.nbytes,
            members=self._members,
            transfer_id=chunked.chunked.transfer_id,
        )

        def on_announced(transport: Transport) -> None:
            self._on_announced(receiver, shared, partial(start, transport))

        return agent_pb2.Payload(broadcast=announced), on_announced

    def _on_announced(self, receiver: BroadcastPeer, shared: _SharedPayload, start: Callable[[], None]) -> None:
        """Keeps the transfer by chunks until the receiver requests it; starts it if that has happened already."""
        with self._lock:
            if shared.number < self._first_missing.get(receiver, shared.number + 1):
                shared.chunk_transfers[receiver] = start
                return
        self._start_chunks(shared, start)

    def resend(self, receiver: BroadcastPeer, first: int) -> None:
        """Aborts the group; sends a receiver by chunks the `first` broadcast that it lacks, and all later ones."""
        with self._lock:
            self._first_missing.setdefault(receiver, first)
            missing = [shared for number, shared in sorted(self._payloads.items()) if number >= first]
            transfers = [(shared, shared.chunk_transfers.pop(receiver, None)) for shared in missing]
        self.abort()
        for shared, start in transfers:
            if start is not None:
                self._start_chunks(shared, start)

    def _start_chunks(self, shared: _SharedPayload, start: Callable[[], None]) -> None:
        self._dependencies.on_resend(shared.data.nbytes)
        start()

    def abort(self, *, forms_again: bool = False) -> None:
        """Ends the group at once. Receivers request by chunks what has been announced and not received.

        Only the first cause tells whether it forms again.
        """
        with self._lock:
            self.forms_again = self.forms_again if self._aborted else forms_again
            self._aborted = True
            is_last = not self._ended and not self._users
            self._ended = True
        self._group.abort()
        if is_last:
            self._tell_receivers()

    def finish(self) -> bool:
        """Ends the group after the queued broadcasts. Returns False if the group is in use."""
        with self._lock:
            if self._users:
                return False
            is_first_end = not self._ended
            self._ended = True
        self._group.finish()
        if is_first_end:
            self._tell_receivers()
        return True

    def close(self) -> None:
        """Ends the group at once, because this worker shuts down, and waits for its thread."""
        self._ended = True
        self._group.close()

    def _tell_receivers(self) -> None:
        """Tells the receivers that the group has ended.

        Called after the last envelope that names a broadcast, since receivers remove a group that has ended.
        """
        for receiver in self.receivers:
            self._dependencies.control.send(receiver.info, ENDED, (self.number, self._aborted))


@final
class Broadcast:
    """The payloads that the messages of one call to several workers share.

    Workers of this host share a segment, the others a process group. Kept until all workers have answered: until
    then, any member of the group may request a payload by chunks.
    """

    def __init__(
        self,
        receivers: tuple[BroadcastPeer, ...],
        threshold: int,
        acquire: Callable[[tuple[BroadcastPeer, ...]], _SendingGroup | None],
        segments: SegmentBroadcast | None,
    ) -> None:
        """Forms no group yet.

        Payloads of at least `threshold` bytes go in segments to workers of this host, and to the receivers by
        their group, which `acquire` returns, or None if there can be none.
        """
        self._receivers = receivers
        self._threshold = threshold
        self._acquire = acquire
        self._segments = segments
        self._group: _SendingGroup | None = None
        self._has_acquired = False
        self._sources: dict[int, tuple[int, int]] = {}
        """Where the bytes of each payload are, by position in the messages. The caller keeps them alive."""
        self._payloads: dict[int, _SharedPayload] = {}
        """Those that the group broadcasts, by position in the messages."""
        self._joined: dict[int, tuple[Gathered, memoryview]] = {}
        """The elements of many tensors, and their copies, by position in the messages."""

    def joined(self, position: int, gathered: Gathered) -> memoryview:
        """Returns a copy of the elements of many tensors of a message: the same one for all that have these."""
        if position not in self._joined:
            self._joined[position] = gathered, gathered.joined()
        first, data = self._joined[position]
        return data if first.has_same_source(gathered) else gathered.joined()

    def put(self, peer: BroadcastPeer, position: int, data: memoryview) -> BroadcastPart | None:
        """Broadcasts the payload at a position of the message to a peer; returns the receiver's part.

        None if the payload has to go another way, because it is small, or not the same bytes as in the first
        message, or because there is no group.
        """
        if data.nbytes < self._threshold:
            return None
        source = address_and_size(data)
        if self._sources.setdefault(position, source) != source:
            return None
        if self._segments is not None:
            part = self._segments.put(peer.shared_memory.segments, position, data)
            if part is not None:
                return part
        return self._put_to_group(peer, position, data) if peer in self._receivers else None

    def _put_to_group(self, peer: BroadcastPeer, position: int, data: memoryview) -> BroadcastPart | None:
        if not self._has_acquired:
            self._has_acquired, self._group = True, self._acquire(self._receivers)
        if self._group is None:
            return None
        payload = self._payloads.get(position)
        is_first = payload is None
        if payload is None:
            payload = self._group.start_broadcast(data)
            if payload is None:
                return None
            self._payloads[position] = payload
        part = self._group.add_receiver(peer, payload)
        return None if part is None else (*part, is_first)

    def not_sent(self, peer: BroadcastPeer) -> None:
        """Aborts the group, because the message to `peer` was not sent: it may not know of all broadcasts."""
        if self._group is not None and any(each.info == peer.info for each in self._receivers):
            self._group.abort(forms_again=True)

    def release(self) -> None:
        """Releases group and segments. Called when all messages have been sent, or could not be."""
        if self._segments is not None:
            self._segments.release()
        if self._group is not None:
            self._group.release()


@final
class Broadcasts:
    """All groups in which one agent broadcasts."""

    def __init__(self, dependencies: ChannelDependencies, memory: SharedMemory) -> None:
        """Forms no group before `open`."""
        self.loop = dependencies.loop
        self.channels = dependencies.options.channels
        self._options = dependencies.options.broadcasts
        self._me = dependencies.handshake.me
        self._memory = memory
        self._dependencies: BroadcastDependencies | None = None
        self._lock = threading.Lock()
        """Guards `_groups` and `_unformable`."""
        self._numbers = itertools.count()
        self._groups: OrderedDict[tuple[BroadcastPeer, ...], _SendingGroup] = OrderedDict()
        """Those that can be used, by receivers; the most recently used group is the last one."""
        self._by_number: weakref.WeakValueDictionary[int, _SendingGroup] = weakref.WeakValueDictionary()
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
        dependencies = self._dependencies
        if len(distant) < 2 or dependencies is None or not dependencies.may_form(self._members(distant)):
            distant = ()
        near = [each.shared_memory.segments for each in others if each.shared_memory.is_connected]
        segments = SegmentBroadcast(self._memory, near) if len(near) > 1 else None
        if not distant and segments is None:
            return None
        return Broadcast(distant, self._options.threshold, self._acquire, segments)

    def _others(self, receivers: Collection[BroadcastPeer]) -> Sequence[BroadcastPeer]:
        others = {each.info.wire_id: each for each in receivers if each.info.wire_id != self._me.wire_id}
        return [others[number] for number in sorted(others)]

    def _members(self, receivers: tuple[BroadcastPeer, ...]) -> tuple[int, ...]:
        return (self._me.wire_id, *(each.info.wire_id for each in receivers))

    def _acquire(self, receivers: tuple[BroadcastPeer, ...]) -> _SendingGroup | None:
        """Acquires the group for these receivers, and makes it if there is none; None if it cannot be formed."""
        with self._lock:
            group = self._groups.get(receivers)
            if group is None or not group.acquire():
                if receivers in self._unformable:
                    return None
                group = self._make_group(receivers)
                group.acquire()
            self._groups.move_to_end(receivers)
            return group

    def _make_group(self, receivers: tuple[BroadcastPeer, ...]) -> _SendingGroup:
        """Makes a group, and ends the least recently used ones beyond `max_groups`. Called with the lock."""
        for others, group in list(self._groups.items()):
            if len(self._groups) >= self._options.max_groups and group.finish():
                del self._groups[others]
        number = next(self._numbers)
        assert self._dependencies is not None
        spec = self._spec(self._dependencies, number, self._members(receivers))
        group = _SendingGroup(number, spec, receivers, self._dependencies, self._on_group_end)
        self._groups[receivers] = self._by_number[number] = group
        return group

    def _spec(self, dependencies: BroadcastDependencies, number: int, members: tuple[int, ...]) -> GroupSpec:
        name = f"broadcast-{members[0]}-{number}"
        return GroupSpec(dependencies.store, name, members, self._me.wire_id, insecure=dependencies.insecure)

    def _on_group_end(self, group: _SendingGroup, has_formed: bool, error: Exception | None) -> None:
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
        channel = self._dependencies.peer(sender).broadcast
        self.loop.call_soon_threadsafe(channel.on_ended, number, was_aborted)

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


@final
class BroadcastChannel:
    """The groups of one sender that this worker takes part in. Used on the loop only, except where it says so."""

    name: ClassVar[str] = "broadcast"

    def __init__(self, peer: ChannelPeer, broadcasts: Broadcasts, chunked: ChunkedChannel) -> None:
        """Takes part in no group of the peer yet. Chunks carry what is not broadcast after all."""
        self.peer = peer
        self.broadcasts = broadcasts
        self.chunked = chunked
        self.groups: dict[int, _ReceivingGroup] = {}
        """By number."""

    def receive(self, payload: agent_pb2.Payload) -> Arriving:
        """Takes part in the broadcast, and returns a future of the bytes."""
        check_size(payload.broadcast.nbytes, self.broadcasts.channels)
        return self._group_of(payload.broadcast).receive(payload.broadcast)

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Leaves the payload's group, whose other members would wait for this one."""
        announced = payload.broadcast
        if announced.group in self.groups or len(self.groups) < MAX_GROUPS:
            self._group_of(announced).discard(announced)

    def drop(self, error: Exception) -> None:
        """Ends the groups of the sender; others are formed if it is back."""
        while self.groups:
            _, group = self.groups.popitem()
            group.fail(error)

    def on_ended(self, number: int, was_aborted: bool) -> None:
        """Handles that the sender has ended a group."""
        if (group := self.groups.get(number)) is not None:
            if was_aborted:
                group.abort()
            group.finish()

    def stop(self) -> None:
        """Ends all groups, and waits for their threads. Must not be called on the loop."""
        for group in list(self.groups.values()):
            group.close()

    def _group_of(self, payload: agent_pb2.BroadcastPayload) -> "_ReceivingGroup":
        """Returns this worker's part in the group that the sender names, and makes it at the first payload."""
        number = payload.group
        group = self.groups.get(number)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                raise ValueError(f"a broadcast payload is refused: its sender has more than {MAX_GROUPS} groups")
            spec = self.broadcasts.join(self.peer.info, number, tuple(payload.members))
            if len(self.groups) >= MAX_RECEIVING_GROUPS:
                spec = None
            group = self.groups[number] = _ReceivingGroup(self, number, spec)
        return group


@dataclass(slots=True)
class _ExpectedBroadcast:
    """A broadcast that an envelope has announced, and that is received into `data`, of uint8."""

    payload: agent_pb2.BroadcastPayload
    data: torch.Tensor
    done: Arriving


@final
class _ReceivingGroup:
    """This worker's membership in a process group in which another worker, the sender, broadcasts payloads.

    If the group fails, this worker requests the first broadcast that it has not received, and all later ones, from
    the sender as chunks: bytes that the sender sends to this worker alone (chunked.py).

    All methods but `close` are called on the agent's event loop.
    """

    def __init__(self, channel: BroadcastChannel, number: int, spec: GroupSpec | None) -> None:
        """Starts to form the group; without a spec, joins none, and receives all payloads as chunks."""
        self._channel = channel
        self._number = number
        self._expected: dict[int, _ExpectedBroadcast] = {}
        """By number of the broadcast in the group."""
        self._next_number = 0
        """The number of the first broadcast that has not been received."""
        self._aborted = False
        self._finishing = False
        """Whether `finish` has been called."""
        self._group: BroadcastGroup | None = None
        if spec is None:
            self.abort()
            return
        self._group = BroadcastGroup(
            spec, lambda _has_formed, error: self._call_soon(self._on_group_end, error is not None)
        )
        self._group.start()

    def receive(self, payload: agent_pb2.BroadcastPayload) -> Arriving:
        """Returns a future of a payload's bytes, received as chunks if this worker has left the group."""
        if self._aborted or self._group is None:
            return self._channel.chunked.receive(_as_chunked(payload))
        if payload.number < self._next_number or payload.number in self._expected:
            raise ValueError(f"broadcast {payload.number} was announced twice")
        data = torch.empty(payload.nbytes, dtype=torch.uint8)
        expected = _ExpectedBroadcast(payload, data, Arriving())
        self._expected[payload.number] = expected
        self._group.put(payload.number, data, lambda: self._call_soon(self._on_received, payload.number))
        return expected.done

    def discard(self, payload: agent_pb2.BroadcastPayload) -> None:
        """Drops a payload that is not wanted. Leaves the group, since all members must run its broadcasts."""
        self.abort()
        self._channel.chunked.discard(_as_chunked(payload))

    def abort(self) -> None:
        """Leaves the group, and requests chunks of the broadcasts that have not been received."""
        if self._aborted:
            return
        self._aborted = True
        if self._group is not None:
            self._group.abort()
        self._channel.broadcasts.request_chunks(self._channel.peer.info, self._number, self._next_number)
        for expected in self._take_expected():
            try:
                self._channel.chunked.receive(_as_chunked(expected.payload), expected.done)
            except Exception as error:  # most likely no memory; a ValueError rejects the message
                expected.done.set_exception(ValueError(f"a payload cannot be received: {error}"))

    def finish(self) -> None:
        """Ends the group after the announced broadcasts. Called when the sender announces no more."""
        self._finishing = True
        if self._group is None or self._aborted:
            self._remove()
        else:
            self._group.finish()

    def fail(self, error: Exception) -> None:
        """Fails the announced broadcasts: the sender is lost or suspect, or this worker shuts down."""
        self._aborted = True
        if self._group is not None:
            self._group.abort()
        for expected in self._take_expected():
            expected.done.set_exception(error)

    def close(self) -> None:
        """Ends the group, and waits a while for its thread. Must not be called on the event loop."""
        if self._group is not None:
            self._group.close()

    def _remove(self) -> None:
        """Has the channel forget the group. May be called twice."""
        self._channel.groups.pop(self._number, None)

    def _take_expected(self) -> list[_ExpectedBroadcast]:
        """Removes the expected broadcasts, and returns those whose futures are pending, in order of numbers."""
        expected = [each for _, each in sorted(self._expected.items()) if not each.done.done()]
        self._expected.clear()
        return expected

    def _on_received(self, number: int) -> None:
        """Completes the future of a broadcast whose bytes have been received."""
        if (expected := self._expected.pop(number, None)) is not None:
            self._next_number = number + 1
            expected.done.set_result(expected.data.numpy().data)

    def _on_group_end(self, failed: bool) -> None:
        """Handles the end of the group: requests chunks of what has not been received."""
        if failed or self._expected:
            self.abort()
        if self._finishing:
            self._remove()

    def _call_soon(self, function: Callable[[Any], None], argument: int) -> None:
        """Calls a function on the event loop, unless the loop has been closed."""
        with contextlib.suppress(RuntimeError):
            self._channel.broadcasts.loop.call_soon_threadsafe(function, argument)


def _as_chunked(payload: agent_pb2.BroadcastPayload) -> agent_pb2.Payload:
    """Returns the description of the payload in chunks that replaces a broadcast."""
    chunked = agent_pb2.ChunkedPayload(transfer_id=payload.transfer_id, nbytes=payload.nbytes)
    return agent_pb2.Payload(chunked=chunked)
