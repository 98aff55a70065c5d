"""How much of a group's log of joins, leaves and evictions a worker knows."""

import hashlib
from dataclasses import dataclass
from typing import final

__all__ = ["RosterVersion"]


@final
@dataclass(frozen=True, slots=True)
class RosterVersion:
    """Tells whether two workers know the same entries.

    length: the number of entries.
    digest: 32 bytes, of all of them in order.
    """

    length: int = 0
    digest: bytes = bytes(32)

    def followed_by(self, text: str) -> "RosterVersion":
        """Returns the version with one more entry."""
        return RosterVersion(self.length + 1, hashlib.sha256(self.digest + text.encode()).digest())
