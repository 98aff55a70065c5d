"""Limits of stores and their servers, so that no client can exhaust the memory or the descriptors of a process.

Operations and their results are parsed within bounds that are checked before anything is built.
"""

from dataclasses import dataclass, fields
from typing import final

from google.protobuf.message import DecodeError

from ...proto.v1.store_pb2 import Operation, Outcome

__all__ = ["MAX_BYTES", "MAX_FIELDS", "MAX_LISTED", "StoreLimits", "parse_operation", "parse_outcome"]

MAX_BYTES = 64 * 1024 * 1024
"""Limit of the keys and values of one operation together, of those of its result, and of one value."""

MAX_FIELDS = 128 * 1024
"""Limit of the number of keys and values of one operation. Each takes some 100 bytes, however short it is."""

MAX_LISTED = 1 << 20
"""Limit of the number of keys that are listed, and so of the keys and values in a result."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What the server of a TCPStore holds at most. Beyond it, operations fail with an error that names the limit.

    max_entries: keys and items of queues.
    max_bytes: bytes of all keys, values and items together; and of the operations that wait, together with the
        items that clients have popped and not confirmed yet.
    max_waiting: operations that wait for keys, of all clients together.
    max_connections: connections; further ones are closed at once. Each store of each process takes one. The limit
        is at most half of the file descriptors that the process may have.
    """

    max_entries: int = 4_000_000
    max_bytes: int = 1024 * 1024 * 1024
    max_waiting: int = 16_384
    max_connections: int = 16_384

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{each.name} is {value!r}: give an int")
            if value < 1:
                raise ValueError(f"{each.name} is {value}: give at least 1")


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf."""

_OTHER_FIELDS = 8
"""Room for the fields that an operation has once, and for those of newer versions."""

_SMALL_BYTES = 1024
"""Bytes of a result that is parsed without a look at it."""


def parse_operation(data: bytes) -> Operation:
    """Parses an Operation. Raises DecodeError for other bytes, and for more than MAX_FIELDS keys and values."""
    _check_fields(data, MAX_FIELDS, "a store operation")
    return Operation.FromString(data)


def parse_outcome(data: bytes) -> Outcome:
    """Parses an Outcome, which a client has from a server that may not be the one of the job.

    Raises DecodeError for other bytes, and for more than MAX_LISTED keys and values.
    """
    if len(data) > _SMALL_BYTES:
        _check_fields(data, MAX_LISTED, "the outcome of a store operation")
    return Outcome.FromString(data)


def _check_fields(data: bytes, limit: int, what: str) -> None:
    """Raises DecodeError if a message has too many fields: even an empty key takes memory when parsed."""
    position, end = 0, len(data)
    for _ in range(limit + _OTHER_FIELDS + 1):
        if position == end:
            return
        tag, position = _read_varint(data, position, what)
        kind = tag & 7
        if kind == _BYTES:
            length, position = _read_varint(data, position, what)
            position += length
        elif kind == _VARINT:
            _, position = _read_varint(data, position, what)
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise DecodeError(f"{what} has a field of wire type {kind}")
        if position > end:
            raise DecodeError(f"{what} is cut off")
    raise DecodeError(f"{what} has more than {limit} keys and values")


def _read_varint(data: bytes, position: int, what: str) -> tuple[int, int]:
    """Returns the number at a position, and the position after it."""
    number = 0
    for shift, byte in zip(range(0, 70, 7), data[position : position + 10], strict=False):
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + shift // 7 + 1
    raise DecodeError(f"{what} has a number that does not end")
