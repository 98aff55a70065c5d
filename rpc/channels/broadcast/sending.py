"""The sending end of broadcasts: one to all receivers, and chunks for those that it does not reach."""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, final

import torch

from ....c10d.groups.membership import GroupSpec
from ....proto.v1 import agent_pb2
from ...contracts.worker import WorkerInfo
from ...wire.small_tensors import Gathered
from ..base import StartTransfer
from ..chunked.channel import ChunkedChannel
from ..shared_memory.broadcast import SegmentBroadcast
from ..shared_memory.channel import SharedMemoryChannel
from ..shared_memory.mapping import address_and_size
from .group import BroadcastGroup

__all__ = ["Broadcast", "BroadcastPeer", "SendingGroup"]

BroadcastPart = tuple[agent_pb2.Payload, StartTransfer | None, bool]
"""A payload's description for a receiver's envelope; what is to be called when that is queued, if anything
remains to be sent; and whether no other receiver's envelope has named the payload yet."""


class BroadcastPeer(Protocol):
    """Another worker that takes part in broadcasts, and its channels."""

    info: WorkerInfo
    chunked: ChunkedChannel
    shared_memory: SharedMemoryChannel

    def on_group_ended(self, number: int, *, was_aborted: bool) -> None:
        """Handles that the worker has ended a group in which it broadcasts. Called on any thread."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _SharedPayload:
    """A payload of a call to several workers. Kept alive by the call until all of them have answered."""

    number: int
    """The number of the broadcast in its group."""
    data: memoryview
    chunk_transfers: dict[BroadcastPeer, StartTransfer] = field(default_factory=dict)
    """By receiver whose envelope is queued, what starts to send it the payload by chunks."""


@final
class SendingGroup:
    """A process group of this worker, which broadcasts, and several receivers. Safe to use from any thread.

    Its users acquire the group before they send, and release it when they have sent all envelopes that name its
    broadcasts. It ends by `finish` when it is not used, or by `abort` at any time.
    """

    def __init__(
        self,
        number: int,
        spec: GroupSpec,
        receivers: tuple[BroadcastPeer, ...],
        *,
        on_end: Callable[["SendingGroup", bool, Exception | None], None],
        send_ended: Callable[[BroadcastPeer, int, bool], None],
        on_resend: Callable[[int], None],
    ) -> None:
        """Starts to form the group of this worker and the receivers, which are in the order of the members.

        Args:
            number: this worker's count of its groups.
            spec: the members, this worker first.
            receivers: the others.
            on_end: takes the group, whether it had formed, and the error that ended it.
            send_ended: tells a receiver the group's number, and whether it was aborted.
            on_resend: takes the bytes of each payload that is sent by chunks after all.
        """
        self.number = number
        self.receivers = receivers
        self._members = spec.members
        self._send_ended = send_ended
        self._on_resend = on_resend
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
            # With the lock, so that broadcasts are queued in the order of their numbers.
            self._group.put(shared.number, _as_tensor(data))
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
        return agent_pb2.Payload(broadcast=announced), lambda: self._on_announced(receiver, shared, start)

    def _on_announced(self, receiver: BroadcastPeer, shared: _SharedPayload, start: StartTransfer) -> None:
        """Keeps the transfer by chunks until the receiver requests it; starts it if that has happened already."""
        with self._lock:
            if shared.number < self._first_missing.get(receiver, shared.number + 1):
                shared.chunk_transfers[receiver] = start
                return
        self._start_chunks(shared, start)

    def resend(self, receiver: BroadcastPeer, first: int) -> None:
        """Sends a receiver by chunks the `first` broadcast that it has not received and all later ones.

        Aborts the group.
        """
        with self._lock:
            self._first_missing.setdefault(receiver, first)
            missing = [shared for number, shared in sorted(self._payloads.items()) if number >= first]
            transfers = [(shared, shared.chunk_transfers.pop(receiver, None)) for shared in missing]
        self.abort()
        for shared, start in transfers:
            if start is not None:
                self._start_chunks(shared, start)

    def _start_chunks(self, shared: _SharedPayload, start: StartTransfer) -> None:
        self._on_resend(shared.data.nbytes)
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
            self._send_ended(receiver, self.number, self._aborted)


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
        acquire: Callable[[tuple[BroadcastPeer, ...]], SendingGroup | None],
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
        self._group: SendingGroup | None = None
        self._has_acquired = False
        self._payloads: dict[int, _SharedPayload] = {}
        """By position in the messages."""
        self._joined: dict[int, tuple[Gathered, memoryview]] = {}
        """The elements of many tensors, and their copies, by position in the messages."""

    def joined(self, position: int, gathered: Gathered) -> memoryview:
        """Returns a copy of the elements of many tensors of a message: the same one for all that have these."""
        if position not in self._joined:
            self._joined[position] = gathered, gathered.joined()
        first, data = self._joined[position]
        return data if first.has_same_source(gathered) else gathered.joined()

    def put(self, peer: BroadcastPeer, position: int, data: memoryview) -> BroadcastPart | None:
        """Broadcasts the payload at a position of the message to a peer.

        Returns:
            The receiver's part; None if the payload must be sent in another way, because it is small, or not the
            same bytes as in the first message, or because there is no group.
        """
        if data.nbytes < self._threshold:
            return None
        if (
            self._segments is not None
            and (part := self._segments.put(peer.shared_memory, position, data)) is not None
        ):
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
        elif address_and_size(payload.data) != address_and_size(data):
            return None
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


def _as_tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
