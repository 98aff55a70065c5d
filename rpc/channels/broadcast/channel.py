"""The channel for what a worker sends to several at once: this worker's part in the groups of one sender."""

from typing import ClassVar, final

from ....proto.v1 import agent_pb2
from ..base import Arriving, ChannelPeer, check_size
from ..chunked.channel import ChunkedChannel
from ..chunked.sending import ChunkParts
from .broadcasts import Broadcasts
from .receiving import ReceivingGroup

__all__ = ["BroadcastChannel"]

MAX_RECEIVING_GROUPS = 256
"""Groups of one sender that a worker takes part in; what is broadcast in further ones it receives by chunks."""

MAX_GROUPS = 16 * MAX_RECEIVING_GROUPS
"""Groups of one sender that a worker knows; what is broadcast in further ones is refused."""


@final
class BroadcastChannel:
    """The groups of one sender that this worker takes part in. Used on the loop only, except where it says so."""

    name: ClassVar[str] = "broadcast"

    def __init__(
        self, peer: ChannelPeer, parts: ChunkParts, broadcasts: Broadcasts, chunked: ChunkedChannel
    ) -> None:
        """Takes part in no group of the peer yet. Chunks carry what is not broadcast after all."""
        self._peer = peer
        self._parts = parts
        self._broadcasts = broadcasts
        self._chunked = chunked
        self.groups: dict[int, ReceivingGroup] = {}
        """By number."""

    def receive(self, payload: agent_pb2.Payload) -> Arriving:
        """Takes part in the broadcast, and returns a future of the bytes."""
        check_size(payload.broadcast.nbytes, self._parts.options)
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

    def on_ended(self, number: int, *, was_aborted: bool) -> None:
        """Handles that the sender has ended a group. Called on any thread."""
        self._parts.loop.call_soon_threadsafe(self._end, number, was_aborted)

    def _end(self, number: int, was_aborted: bool) -> None:
        group = self.groups.get(number)
        if group is None:
            return
        if was_aborted:
            group.abort()
        group.finish()

    def stop(self) -> None:
        """Ends all groups, and waits for their threads. Must not be called on the loop."""
        for group in list(self.groups.values()):
            group.close()

    def _group_of(self, payload: agent_pb2.BroadcastPayload) -> ReceivingGroup:
        """Returns this worker's part in the group that the sender names, and makes it at the first payload."""
        number, sender = payload.group, self._peer.info
        group = self.groups.get(number)
        if group is None:
            if len(self.groups) >= MAX_GROUPS:
                raise ValueError(f"a broadcast payload is refused: its sender has more than {MAX_GROUPS} groups")
            spec = self._broadcasts.join(sender, number, tuple(payload.members))
            group = self.groups[number] = ReceivingGroup(
                self._parts.loop,
                spec if len(self.groups) < MAX_RECEIVING_GROUPS else None,
                self._chunked,
                request_chunks=lambda first: self._broadcasts.request_chunks(sender, number, first),
                on_removed=lambda: self.groups.pop(number, None),
            )
        return group
