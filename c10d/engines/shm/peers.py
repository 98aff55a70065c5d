"""Whether the other ranks of a group are still there, and why this one is not."""

from collections.abc import Iterable, Sequence
from typing import Final, final

from ....errors import RankLostError
from ..base import Setup
from .layout import TEXT, Layout
from .members import ShmMember
from .segment import Segment
from .signals import Signals

__all__ = ["Peers"]

_LEFT, _LEFT_WITHOUT = 1, 2
"""What a rank posts when it leaves: the one, or the other and the number of the rank that it has lost."""


@final
class Peers:
    """The ranks of a group, seen from one of them."""

    def __init__(
        self, setup: Setup, members: list[ShmMember], layout: Layout, segment: Segment, signals: Signals
    ) -> None:
        self.rank: Final = setup.rank
        self.size: Final = setup.size
        self._members = members
        self._layout = layout
        self._segment = segment
        self._signals = signals
        self._global_ranks = setup.global_ranks
        self._failure: Exception | None = None

    def leave(self, error: Exception) -> None:
        """Makes `check` raise `error` from now on, and tells the other ranks that this one is gone."""
        if self._failure is not None:
            return
        self._failure = error
        cause = error if isinstance(error, RankLostError) else None
        text = (cause.reason if cause else str(error)).encode()[:TEXT]
        place = self._layout.text(self.rank)
        self._segment.bytes.numpy()[place : place + len(text)] = memoryview(text)
        self._signals.post(self._layout.left(self.rank), _LEFT if cause is None else _LEFT_WITHOUT + cause.rank)
        self._signals.disturb()

    def check(self) -> None:
        """Raises what this rank left with, if it has."""
        if self._failure is not None:
            raise self._failure

    def lost(self, ranks: Sequence[int]) -> RankLostError | None:
        """The error that says which of these ranks died or left; None if all are there."""
        # First who left, then who died, and the latter counts: others leave because one died.
        left = [rank for rank in ranks if self._has_left(rank)]
        died = self.died(ranks)
        if died is not None or not left:
            return died
        # A process that is killed may be missed by another rank's watch before its end is to be seen from here.
        cause = self._signals.value(self._layout.left(left[0])) - _LEFT_WITHOUT
        if cause >= 0 and cause != self._global_ranks[self.rank]:
            return RankLostError(cause, self._text(left[0]))
        return RankLostError(self._global_ranks[left[0]], f"it left the group: {self._text(left[0])}")

    def died(self, ranks: Sequence[int]) -> RankLostError | None:
        """The error that says which of these ranks' processes ended while in the group; None if none did."""
        for rank in ranks:
            member = self._members[rank]
            if not member.lives() and not self._has_left(rank):
                return RankLostError(self._global_ranks[rank], f"its process, {member.pid}, has ended")
        return None

    def _has_left(self, rank: int) -> bool:
        return self._signals.value(self._layout.left(rank)) != 0

    def number(self, rank: int) -> int:
        """Of a rank of the group, in the default group."""
        return self._global_ranks[rank]

    def names(self, ranks: Iterable[int]) -> str:
        """Of ranks, for messages."""
        return "rank " + ", ".join(str(self._global_ranks[rank]) for rank in ranks)

    def _text(self, rank: int) -> str:
        place = self._layout.text(rank)
        return bytes(self._segment.bytes.numpy()[place : place + TEXT]).rstrip(b"\0").decode(errors="replace")
