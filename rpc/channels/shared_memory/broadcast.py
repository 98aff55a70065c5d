"""One segment for the same payload to several workers of this host."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from ....proto.v1 import agent_pb2
from .channel import SharedMemoryChannel
from .mapping import address_and_size
from .memory import SharedMemory
from .peer import PeerSegments, describe
from .sending import Segment

__all__ = ["SegmentBroadcast"]


@dataclass(slots=True)
class _SharedPayload:
    """A payload in a segment, whose source is kept alive by the caller, and who is not told of it yet."""

    segment: Segment
    source: tuple[int, int]
    missing: set[PeerSegments]


@final
class SegmentBroadcast:
    """The payloads in segments that the messages of one call share. Used by one thread.

    The receivers map these segments privately, so each can write to what it receives.
    """

    def __init__(self, memory: SharedMemory, receivers: Collection[PeerSegments]) -> None:
        """Shares nothing yet. Uses the segments that exactly these receive."""
        self._pool = memory.pool_for(receivers)
        self._receivers = receivers
        self._payloads: dict[int, _SharedPayload] = {}
        """By position in the messages."""

    @classmethod
    def to(cls, memory: SharedMemory, channels: Collection[SharedMemoryChannel]) -> "SegmentBroadcast | None":
        """Returns what messages to these workers share; None if fewer than two of them are connected."""
        segments = [channel.segments for channel in channels]
        connected = [each for each in segments if each.is_connected]
        return cls(memory, connected) if len(connected) > 1 else None

    def put(
        self, receiver: SharedMemoryChannel, position: int, data: memoryview
    ) -> tuple[agent_pb2.Payload, None, bool] | None:
        """Copies a payload of a message into a segment, if that of an earlier message has not been the same.

        Args and returns as `Broadcast.put`. None also if the receiver has no segments, or there is no memory.
        """
        segments = receiver.segments
        if segments not in self._receivers:
            return None
        shared = self._payloads.get(position)
        is_first = shared is None
        if shared is None:
            segment = self._put_first(data)
            if segment is None:
                return None
            shared = _SharedPayload(segment, address_and_size(data), set(self._receivers))
            self._payloads[position] = shared
        elif shared.source != address_and_size(data):
            return None
        shared.missing.discard(segments)
        return describe(shared.segment.number, data.nbytes), None, is_first

    def _put_first(self, data: memoryview) -> Segment | None:
        put = self._pool.put(data)
        if put is None:
            return None
        segment, is_new = put
        if is_new and not self._announce(segment):
            self._pool.discard(segment)
            return None
        return segment

    def _announce(self, segment: Segment) -> bool:
        """Passes a new segment to all receivers, before their messages; returns False if it has to be removed."""
        descriptors = [segment.descriptor]
        try:
            while len(descriptors) < len(self._receivers):
                descriptors.append(os.dup(segment.descriptor))
        except OSError:  # too many are open
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        for receiver, descriptor in zip(self._receivers, descriptors, strict=True):
            receiver.announce(segment, descriptor)
        return True

    def release(self) -> None:
        """Takes the segments back from receivers to which no message has named them. Called after the last one."""
        for shared in self._payloads.values():
            for receiver in shared.missing:
                self._pool.take_back(receiver, [shared.segment.number])
