"""Tracks which ranks of a group have died or left, and why this rank has left."""

from collections.abc import Iterable, Sequence
from typing import Final, final

from ....errors import RankLostError
from ..base import Setup
from .layout import REASON_BYTES
from .processes import RankProcess
from .segment import Segment

__all__ = ["Peers"]

_LEFT, _LEFT_AFTER_LOSS = 1, 2
"""Values that a rank rings its `left` doorbell with.

`_LEFT_AFTER_LOSS` plus a global rank says that the rank left because it had lost that one.
"""


@final
class Peers:
    """The other ranks of a group, as one rank sees them. Used from any thread."""

    def __init__(self, setup: Setup, processes: list[RankProcess], segment: Segment) -> None:
        self.rank: Final = setup.rank
        self.size: Final = setup.size
        self._processes = processes
        self._layout = segment.layout
        self._segment = segment
        self._doorbells = segment.doorbells
        self.global_ranks: Final = setup.global_ranks
        self._failure: Exception | None = None

    def leave(self, error: Exception) -> None:
        """Makes `check` raise `error` from now on, and tells the other ranks that this one has left."""
        if self._failure is not None:
            return
        self._failure = error
        loss = error if isinstance(error, RankLostError) else None
        reason = (loss.reason if loss else str(error)).encode()[:REASON_BYTES]
        offset = self._layout.reason_offset(self.rank)
        self._segment.bytes.numpy()[offset : offset + len(reason)] = memoryview(reason)
        value = _LEFT if loss is None else _LEFT_AFTER_LOSS + loss.rank
        self._doorbells.ring(self._layout.left_doorbell(self.rank), value)
        self._doorbells.wake_local_waiters()

    def check(self) -> None:
        """Raises the error that this rank left with, if it has left."""
        if self._failure is not None:
            raise self._failure

    def find_lost(self, ranks: Sequence[int]) -> RankLostError | None:
        """Returns an error for one of these ranks that has died or left; None if there is none."""
        # Departures are read before deaths, but a death is reported first: other ranks leave because of it.
        left = [rank for rank in ranks if self._has_left(rank)]
        dead = self.find_dead(ranks)
        if dead is not None or not left:
            return dead
        # Another rank's failure detector may report a killed process before its end can be seen from here.
        lost_rank = self._doorbells.value(self._layout.left_doorbell(left[0])) - _LEFT_AFTER_LOSS
        if lost_rank >= 0 and lost_rank != self.global_ranks[self.rank]:
            return RankLostError(lost_rank, self._leave_reason(left[0]))
        return RankLostError(self.global_ranks[left[0]], f"it left the group: {self._leave_reason(left[0])}")

    def find_dead(self, ranks: Sequence[int]) -> RankLostError | None:
        """Returns an error for one of these ranks whose process ended without leaving; None if there is none."""
        for rank in ranks:
            process = self._processes[rank]
            if not process.is_alive() and not self._has_left(rank):
                return RankLostError(self.global_ranks[rank], f"its process, {process.pid}, has ended")
        return None

    def describe(self, ranks: Iterable[int]) -> str:
        """Names ranks in error messages by their global ranks, as in `"rank 1, 2"`."""
        return "rank " + ", ".join(str(self.global_ranks[rank]) for rank in ranks)

    def _has_left(self, rank: int) -> bool:
        return self._doorbells.value(self._layout.left_doorbell(rank)) != 0

    def _leave_reason(self, rank: int) -> str:
        offset = self._layout.reason_offset(rank)
        text = bytes(self._segment.bytes.numpy()[offset : offset + REASON_BYTES])
        return text.rstrip(b"\0").decode(errors="replace")
