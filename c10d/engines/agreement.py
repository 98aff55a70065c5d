"""Has ranks compare their calls of a collective before they send its data.

Libraries such as Gloo and MPI take the sizes that this rank gives for those of the other ranks. If these differ,
they write wrong numbers, read memory that nobody has written, wait for ever, or end the process. So engines on
them first exchange fingerprints of the calls (fingerprint.py), one message between each two ranks.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

import torch
from torch import Tensor

from .base import Setup
from .fingerprint import mismatch

__all__ = ["Agreement"]

Exchange = Callable[[Tensor, Tensor], None]
"""Sends element i of the second tensor to rank i, and waits until the first has the elements of all ranks for this
one."""


@final
class Agreement:
    """Compares the calls of one group on one rank.

    Args:
        setup: of the engine.
    """

    def __init__(self, setup: Setup) -> None:
        self._rank: Final = setup.rank
        self._size: Final = setup.size
        self._global_ranks: Final = setup.global_ranks

    def reach(self, exchange: Exchange, call: int | Sequence[int], expected: Sequence[int] | None = None) -> None:
        """Waits until all ranks have called a collective, and compares the calls.

        Args:
            exchange: carries the fingerprints.
            call: fingerprint of this rank's call, or those for each of the ranks.
            expected: the fingerprint that each rank must have for this one; if None, that of this rank's call.

        Raises:
            CollectiveMismatchError: a rank has made another call.
        """
        if self._size == 1:
            return
        given = [call] * self._size if isinstance(call, int) else list(call)
        wanted = given if expected is None else list(expected)
        sent = torch.tensor(given)
        received = torch.empty_like(sent)
        exchange(received, sent)
        found = received.tolist()
        if found != wanted:
            rank = next(rank for rank in range(self._size) if found[rank] != wanted[rank])
            ranks = self._global_ranks
            raise mismatch(ranks[rank], found[rank], ranks[self._rank], given[rank], wanted[rank])
