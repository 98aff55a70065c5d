"""Buffers that are written one after another by one call of `sendmsg`."""

from collections.abc import Sequence
from typing import Final

__all__ = ["MAX_AT_ONCE", "first_bytes", "without_first"]

MAX_AT_ONCE: Final = 512 << 10
"""Bytes of one call, at most. On the loopback interface, while the peer reads, one call with 1 MiB took twice as
long as two with half of it."""


def first_bytes(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Returns the first bytes of buffers, at most so many."""
    first = []
    for buffer in buffers:
        if nbytes > 0:
            first.append(buffer[:nbytes])
        nbytes -= buffer.nbytes
    return first


def without_first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Returns buffers without so many bytes at the beginning."""
    left = []
    for buffer in buffers:
        if nbytes < buffer.nbytes:
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - buffer.nbytes)
    return left
