"""The parts in which payloads travel by bulk connections, and their headers.

A header has no sizes: those follow from the size that the payload's envelope announces. So a header cannot make
the receiver allocate, or read, anything that has not been announced.
"""

import struct
from typing import NamedTuple

__all__ = [
    "HEADER_BYTES",
    "PART_BYTES",
    "PartHeader",
    "count_parts",
    "pack_header",
    "range_of_part",
    "unpack_header",
]

PART_BYTES = 1 << 20
"""Bytes of each part of a payload but the last one. Part of the protocol."""

_MAGIC = b"part"
_HEADER = struct.Struct("<4sIQ")

HEADER_BYTES = _HEADER.size


class PartHeader(NamedTuple):
    """Which part of which payload follows."""

    transfer_id: int
    number: int
    """Of the part in its payload, from 0."""


def pack_header(header: PartHeader) -> bytes:
    """Returns the header of a part as it is sent."""
    return _HEADER.pack(_MAGIC, header.number, header.transfer_id)


def unpack_header(data: bytes | bytearray) -> PartHeader:
    """Returns the header in HEADER_BYTES bytes. Raises ValueError if they are none."""
    magic, number, transfer_id = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ValueError(f"the header of a part begins with {magic!r}, not {_MAGIC!r}")
    return PartHeader(transfer_id, number)


def count_parts(nbytes: int) -> int:
    """Returns how many parts a payload has."""
    return -(-nbytes // PART_BYTES)


def range_of_part(number: int, nbytes: int) -> tuple[int, int]:
    """Returns where a part of a payload of `nbytes` begins and ends. Raises ValueError if it has no such part."""
    start = number * PART_BYTES
    if not 0 <= start < nbytes:
        raise ValueError(f"part {number} of a payload of {nbytes} bytes")
    return start, min(start + PART_BYTES, nbytes)
