"""The ranks that have left a process group, and which operations need them."""

from typing import final

from ...errors import RankLostError
from ..engines.collective_call import ANY_RANK

__all__ = ["Departures"]


@final
class Departures:
    """The ranks that have left one group without an error. Other ranks can still exchange messages.

    errors: by rank, what an operation raises that needs this rank.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.errors: dict[int, RankLostError] = {}

    def affects(self, rank: int, peer: int | None) -> bool:
        """Returns whether an operation needs a rank that has left.

        Args:
            rank: the rank that has left.
            peer: the peer of the operation; None for a collective, which needs all ranks. A receive from ANY_RANK
                needs this rank only if no other rank is left.
        """
        return peer in {None, rank} or (peer == ANY_RANK and len(self.errors) == self._size - 1)

    def raise_if_needed(self, peer: int | None) -> None:
        """Raises RankLostError if an operation with this peer (see `affects`) needs a rank that has left."""
        for rank, error in self.errors.copy().items():
            if self.affects(rank, peer):
                raise error
