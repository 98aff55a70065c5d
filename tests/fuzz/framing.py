"""Puts several messages into one input."""

import struct
from collections.abc import Iterable

__all__ = ["framed", "unframed"]

MAX_MESSAGES = 64

_LENGTH = struct.Struct("<H")


def framed(messages: Iterable[bytes]) -> bytes:
    """Returns an input of messages, each after its length."""
    return b"".join(_LENGTH.pack(len(each)) + each for each in messages)


def unframed(data: bytes) -> list[bytes]:
    """Returns up to MAX_MESSAGES messages of which an input consists. The last one may be cut off."""
    messages, position = [], 0
    while len(messages) < MAX_MESSAGES and position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        messages.append(data[position : position + length])
        position += length
    return messages
