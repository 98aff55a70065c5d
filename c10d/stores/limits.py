"""Limits of stores and their servers, so that no client can exhaust the memory or the descriptors of a process."""

from dataclasses import dataclass, fields
from typing import final

__all__ = ["MAX_BYTES", "MAX_FIELDS", "MAX_LISTED", "StoreLimits"]

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
