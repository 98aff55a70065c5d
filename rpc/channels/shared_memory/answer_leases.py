"""Reads the payloads of an answer that are in segments, on the thread that waits for it."""

from collections.abc import Mapping as AnyMapping
from typing import NamedTuple, Protocol, final

from ....proto.v1 import agent_pb2
from ...contracts.messages import Buffer
from .leases import Memory
from .mapping import Mapping

__all__ = ["AnswerLeases", "LeasedSegments", "SegmentPlace", "segment_place"]


class LeasedSegments(Protocol):
    """Segments that payloads are in: those of the sender, or those of this worker that the sender gives back."""

    def is_leased(self, number: int) -> bool:
        """Returns whether the bytes in a segment are in use here."""

    def note_lease(self, number: int, buffer: Memory) -> None:
        """Has a segment in use until nothing refers to this buffer of its bytes any more."""


class SegmentPlace(NamedTuple):
    """The segment of a payload."""

    number: int
    is_sent_back: bool
    """Whether it is one of the receiver's own."""


def segment_place(payload: agent_pb2.Payload) -> SegmentPlace:
    """Returns the segment of a payload."""
    return SegmentPlace(payload.segment.number, payload.segment.sent_back)


@final
class AnswerLeases:
    """Reads the payloads of an answer, some of which are in segments, on the thread that waits for it.

    A signal handler that raises may interrupt that thread at any step, and then another thread reads all of them
    from the beginning. Until it is known that nobody will, each buffer stays here: a lease is the life of a buffer
    and ends once, after all reading.
    """

    __slots__ = ("_buffers", "_found", "is_released")

    def __init__(self, found: AnyMapping[SegmentPlace, tuple[LeasedSegments, Mapping]]) -> None:
        """Leases nothing yet. Args: found: the answer's segments and their memory."""
        self._found = found
        self._buffers: dict[SegmentPlace, Memory] = {}
        self.is_released = False
        """Whether nobody may read any more: the segments may have been given back."""

    def read(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes of a payload, the same ones each time: a PayloadReader."""
        if not payload.HasField("segment"):
            return payload.inline
        place = segment_place(payload)
        segments, mapping = self._found[place]
        buffer = self._buffers.get(place)
        if buffer is None:
            # Kept first: if it is interrupted before the lease, nothing is given back yet.
            buffer = self._buffers[place] = mapping.buffer()
        if not segments.is_leased(place.number):
            segments.note_lease(place.number, buffer)
        return memoryview(buffer).cast("B")[: payload.segment.nbytes]

    def release(self) -> None:
        """Keeps the bytes no longer: their segments go back when nothing else refers to them."""
        self.is_released = True
        self._buffers.clear()
