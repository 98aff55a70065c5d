"""The frames of an envelope socket: a header, with the length and the kind of the content, and the content."""

import struct
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

from .base import BEGINNING_BYTES

__all__ = [
    "HEADER",
    "MAX_ATTACHING_BYTES",
    "MAX_NUMBERS",
    "MAX_SIDE_FRAME_BYTES",
    "SEGMENT",
    "FrameKind",
    "beginning_of",
    "numbers_frame",
    "numbers_in",
    "take_numbers",
]

MAX_NUMBERS = 1024
"""Numbers of segments in a frame."""

MAX_SIDE_FRAME_BYTES = 8 * MAX_NUMBERS
"""Bytes of the content of a frame that is no envelope."""

MAX_ATTACHING_BYTES = 64 << 10
"""Bytes of an envelope that other bytes may follow."""

HEADER = struct.Struct("<IB")
"""Length in bytes, and kind."""

SEGMENT = struct.Struct("<QQ")
"""The content of a frame about a new segment: its number, and its size in bytes."""


class FrameKind(IntEnum):
    """The kinds of frames."""

    ENVELOPE = 0
    END = 1
    SEGMENT = 2  # a number and a size; with a descriptor
    RELEASED = 3  # numbers of segments
    DROPPED = 4  # the same
    SHARED_SEGMENT = 5  # as SEGMENT
    HEARTBEAT = 6  # empty
    PULSE = 7  # empty; with a descriptor
    PULSE_READ = 8  # empty
    ATTACHED = 9  # as ENVELOPE; what is attached to it follows
    SPENT = 10  # as RELEASED, of segments that are not to be used again


def numbers_frame(kind: FrameKind, numbers: Sequence[int]) -> bytes:
    """Returns a frame with numbers of segments, at most MAX_NUMBERS."""
    return HEADER.pack(8 * len(numbers), kind) + struct.pack(f"<{len(numbers)}Q", *numbers)


def numbers_in(content: bytes) -> Sequence[int]:
    """Returns the numbers of segments in the content of a frame. Raises ValueError if it has another length."""
    if len(content) % 8:
        raise ValueError("numbers of segments of another length")
    return struct.unpack(f"<{len(content) // 8}Q", content)


def take_numbers(numbers: deque[int]) -> Sequence[int]:
    """Takes numbers of segments for a frame out of a queue, which other threads may take from, too."""
    taken: list[int] = []
    try:
        while len(taken) < MAX_NUMBERS:
            taken.append(numbers.popleft())
    except IndexError:  # there are no more
        pass
    return taken


def beginning_of(frame: bytes) -> bytes:
    """Returns the beginning of the envelope in a frame; empty if it has none."""
    has_envelope = HEADER.unpack_from(frame)[1] in (FrameKind.ENVELOPE, FrameKind.ATTACHED)
    return frame[HEADER.size : HEADER.size + BEGINNING_BYTES] if has_envelope else b""
