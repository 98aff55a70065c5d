"""Where everything is in the memory that the ranks of a group share.

The first line is the segment's. Then come the signals (shm_signals.py): one line for each rank and purpose, and
two for each channel, that is, for each pair of ranks. Then, for each rank, the text that says why it left; then
the slots of collectives, two for each rank; then the blocks of channels.
"""

from dataclasses import dataclass
from typing import final

from .signals import LINE

__all__ = ["BLOCKS", "SLOT", "TEXT", "Layout"]

SLOT = 512 * 1024
"""Bytes of a slot. Larger tensors go through it piece by piece."""

BLOCKS = 8
"""How many blocks a channel has: so many messages, or pieces of one, can be under way."""

TEXT = 512
"""Bytes of the reason why a rank left."""

_CHANNELS = 8 * 1024 * 1024
"""Bytes of all channels to one rank, as long as blocks are neither larger nor smaller than these."""
_LARGEST_BLOCK = 256 * 1024
_SMALLEST_BLOCK = 4 * 1024

_PAGE = 4096


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Numbers of signals and places of data, in bytes from the beginning, for a group of `size` ranks.

    The whole takes up to 9 MiB for each rank of a group of up to 128, of which only what is used becomes memory.
    """

    size: int

    def left(self, rank: int) -> int:
        """Signal: not 0 once the rank has left the group."""
        return 1 + rank

    def doorbell(self, rank: int) -> int:
        """Signal: changes whenever something is sent to the rank."""
        return 1 + self.size + rank

    def filled(self, rank: int) -> int:
        """Signal: the round for which the rank has filled its slot."""
        return 1 + 2 * self.size + rank

    def reduced(self, rank: int) -> int:
        """Signal: the round in which the rank has reduced its part of all slots."""
        return 1 + 3 * self.size + rank

    def done(self, rank: int) -> int:
        """Signal: the round that the rank is through with: it reads the slots of that round no more."""
        return 1 + 4 * self.size + rank

    def sent(self, source: int, to: int) -> int:
        """Signal: how many blocks have been put on a channel."""
        return 1 + 5 * self.size + source * self.size + to

    def taken(self, source: int, to: int) -> int:
        """Signal: how many blocks have been taken off a channel."""
        return 1 + (5 + self.size) * self.size + source * self.size + to

    def text(self, rank: int) -> int:
        """Place of the reason why a rank left."""
        return LINE * (1 + (5 + 2 * self.size) * self.size) + TEXT * rank

    def slot(self, rank: int, parity: int) -> int:
        """Place of the rank's slot for even or odd rounds."""
        return _up(self.text(self.size)) + (2 * rank + parity) * SLOT

    @property
    def block_bytes(self) -> int:
        """Of data in a block."""
        each = _CHANNELS // (self.size * BLOCKS) // LINE * LINE
        return min(max(each, _SMALLEST_BLOCK), _LARGEST_BLOCK)

    def blocks(self, source: int, to: int) -> int:
        """Place of the blocks of a channel, each after a line with what it is."""
        channel = source * self.size + to
        return self.slot(self.size, 0) + channel * BLOCKS * (LINE + self.block_bytes)

    @property
    def total(self) -> int:
        """Bytes of the whole."""
        return _up(self.blocks(self.size, 0))


def _up(place: int) -> int:
    """The next beginning of a page."""
    return -(-place // _PAGE) * _PAGE
