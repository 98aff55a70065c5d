"""Defines the layout of the memory segment that the ranks of a group share.

In this order: one cache line of the segment itself; the doorbells (doorbells.py), one for each rank and purpose
and two for each channel, that is, for each ordered pair of ranks; for each rank the text that says why it left;
the slots of collectives, two for each rank; and the blocks of the channels.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

from .doorbells import CACHE_LINE_BYTES

__all__ = ["BLOCKS_PER_CHANNEL", "REASON_BYTES", "SLOT_BYTES", "Channel", "Layout"]

SLOT_BYTES = 512 * 1024
"""Bytes of a slot. Larger tensors go through it in pieces."""

BLOCKS_PER_CHANNEL = 8
"""How many messages, or pieces of one, can be in flight on a channel."""

REASON_BYTES = 512
"""Bytes of the text that says why a rank left; longer texts are cut."""

_CHANNELS_BYTES_PER_RANK = 8 * 1024 * 1024
"""Bytes of all channels to one rank, as far as the bounds on the size of a block allow."""
_MAX_BLOCK_BYTES = 256 * 1024
_MIN_BLOCK_BYTES = 4 * 1024

_PAGE_BYTES = 4096


class Channel(NamedTuple):
    """Where the messages from one rank to another are.

    sent, received: doorbells that count the blocks written to and read from the channel.
    blocks: offset of the first block; each has a header of one cache line, and data.
    """

    sent: int
    received: int
    blocks: int


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Indices of doorbells and offsets of data for a group of `size` ranks; offsets are bytes from the start.

    With up to 128 ranks the segment takes up to 9 MiB for each, of which only pages that are written use memory.
    """

    size: int

    def left_doorbell(self, rank: int) -> int:
        """Returns the doorbell that is not 0 once the rank has left the group."""
        return 1 + rank

    def inbox_doorbell(self, rank: int) -> int:
        """Returns the doorbell that changes with everything that is sent to the rank."""
        return 1 + self.size + rank

    def filled_doorbell(self, rank: int) -> int:
        """Returns the doorbell with the last round for which the rank has filled its slot."""
        return 1 + 2 * self.size + rank

    def reduced_doorbell(self, rank: int) -> int:
        """Returns the doorbell with the last round in which the rank has reduced its part of all slots."""
        return 1 + 3 * self.size + rank

    def done_doorbell(self, rank: int) -> int:
        """Returns the doorbell with the last round whose slots the rank does not read any more."""
        return 1 + 4 * self.size + rank

    def reason_offset(self, rank: int) -> int:
        """Returns the offset of the text that says why a rank left, of `REASON_BYTES` bytes."""
        return CACHE_LINE_BYTES * (1 + (5 + 2 * self.size) * self.size) + REASON_BYTES * rank

    def slot_offset(self, rank: int, parity: int) -> int:
        """Returns the offset of the rank's slot for even (parity 0) or odd (1) rounds."""
        return _page_aligned(self.reason_offset(self.size)) + (2 * rank + parity) * SLOT_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of data in a block."""
        share = _CHANNELS_BYTES_PER_RANK // (self.size * BLOCKS_PER_CHANNEL)
        aligned = share // CACHE_LINE_BYTES * CACHE_LINE_BYTES
        return min(max(aligned, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)

    def channel(self, source: int, target: int) -> Channel:
        """Returns the channel by which one rank sends to another."""
        number, stride = source * self.size + target, CACHE_LINE_BYTES + self.block_bytes
        sent = self.done_doorbell(self.size) + number
        blocks = self.slot_offset(self.size, 0) + number * BLOCKS_PER_CHANNEL * stride
        return Channel(sent, sent + self.size * self.size, blocks)

    @property
    def total_bytes(self) -> int:
        """Bytes of the segment."""
        return _page_aligned(self.channel(self.size, 0).blocks)


def _page_aligned(offset: int) -> int:
    """Rounds up to the start of a page."""
    return -(-offset // _PAGE_BYTES) * _PAGE_BYTES
