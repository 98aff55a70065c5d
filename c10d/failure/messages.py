"""What the ranks of a group tell each other of those that have died, left or failed."""

from typing import NamedTuple

from ...net.security import printable

__all__ = ["DIED", "DROPPED", "LEFT", "Message", "parse_message"]

DIED = "its process died or ended without leaving the group, or its host cannot be reached"
LEFT = "left the group"
DROPPED = "dropped the group: nothing in its program refers to it any more"
"""How a rank has left, unless it says more."""

MAX_REASON_BYTES = 512
"""Bytes of the text that says why a rank has left or failed; longer texts are cut."""


class Message(NamedTuple):
    """What one rank tells another: that a rank is `"lost"`, has `"left"`, or has `"failed"`, and why."""

    keyword: str
    rank: int
    reason: str

    def to_line(self) -> bytes:
        """Returns the line that is sent."""
        reason = " ".join(self.reason.split()).encode()[:MAX_REASON_BYTES]
        return f"{self.keyword} {self.rank} ".encode() + reason + b"\n"


def parse_message(line: bytes, size: int) -> Message:
    """Reads a line of a rank of a group of `size` ranks; raises ValueError for a line that is no message."""
    keyword, rank, *reason = line.decode(errors="replace").split(maxsplit=2)
    if keyword not in {"lost", "left", "failed"} or not 0 <= int(rank) < size:
        raise ValueError(f"{printable(keyword)} of rank {int(rank)} of {size} is no message")
    return Message(keyword, int(rank), printable(reason[0].strip() if reason else LEFT, MAX_REASON_BYTES))
