"""Rounds in which ranks show each other data: what collectives are made of.

Each rank has two slots, for even and odd rounds. In a round some ranks fill slots and post the number of the
round, others wait for that and read, and all say when they are through. A slot is filled again two rounds later,
once all ranks are through with the earlier round, so that a rank may be one round ahead of the slowest. All ranks
go through the same rounds.

With the number of the round a rank posts what it is doing, as one number; those that read compare it with what
they do themselves.
"""

import time
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ....errors import CollectiveMismatchError, CollectiveTimeoutError
from .calls import describe
from .layout import SLOT, Layout
from .peers import Peers
from .segment import Segment
from .signals import LINE, Signals

__all__ = ["SlotExchange"]

_WORD = 8
_CALL = 2
"""Of the words of a signal, the first of two with what a rank calls, in even and odd rounds."""
_KEPT_VIEWS = 128


@final
class SlotExchange:
    """The slots of a group, used by one thread at a time."""

    def __init__(self, layout: Layout, segment: Segment, signals: Signals, peers: Peers) -> None:
        self._layout = layout
        self._signals = signals
        self._words = signals.words
        self._peers = peers
        self._rank = peers.rank
        self._ranks = range(peers.size)
        self._others = [other for other in self._ranks if other != self._rank]
        places = [[layout.slot(each, parity) for each in self._ranks] for parity in (0, 1)]
        self._addresses = [[segment.address + place for place in row] for row in places]
        self._slots = [[segment.bytes[place : place + SLOT] for place in row] for row in places]
        self._views: dict[tuple[int, torch.dtype, int, int], list[Tensor]] = {}
        self._round = 0
        self._parity = 0
        self._finished = 0  # a round that all ranks are known to be through with
        # Of the operation under way:
        self._operation = ""
        self._call = 0
        self._seconds = 0.0
        self._deadline = 0.0
        self._awaited: tuple[Sequence[int], int, int] = ((), 0, 0)

    def begin(self, operation: str, seconds: float, call: int) -> None:
        """Starts an operation.

        seconds: how long it may take.
        call: what this rank does, as shm_calls encodes it.
        """
        self._peers.check()
        self._operation = operation
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._call = call

    def open(self) -> None:
        """Begins a round: waits until the slots of the last but one may be filled."""
        number = self._round = self._round + 1
        self._parity = number & 1
        if self._finished < number - 2:
            self._wait(self._layout.done(0), self._others, number - 2)
            self._finished = number - 2

    def slot(self, rank: int) -> int:
        """The address of a rank's slot in this round."""
        return self._addresses[self._parity][rank]

    def views(self, dtype: torch.dtype, start: int, stop: int) -> list[Tensor]:
        """Of every rank's slot of this round, the elements from `start` to `stop`."""
        key = (self._parity, dtype, start, stop)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            views = [slot.view(dtype)[start:stop] for slot in self._slots[self._parity]]
            self._views[key] = views
        return views

    def post(self) -> None:
        """Says that this rank has filled what it fills in this round."""
        signal = self._layout.filled(self._rank)
        at = signal * (LINE // _WORD) + self._parity
        self._words[at + _CALL] = self._call
        self._signals.post(signal, self._round)

    def read(self, ranks: Sequence[int]) -> None:
        """Waits until these have posted, and checks that they do the same."""
        self.wait(ranks)
        for rank in ranks:
            self.compare(rank, self._call)

    def wait(self, ranks: Sequence[int]) -> None:
        """Waits until these have posted."""
        self._wait(self._layout.filled(0), ranks, self._round)

    def compare(self, rank: int, wanted: int) -> None:
        """Checks what a rank that has posted calls.

        Raises:
            CollectiveMismatchError: it is not this.
        """
        theirs = self._words[self._layout.filled(rank) * (LINE // _WORD) + _CALL + self._parity]
        if theirs != wanted:
            me, other = self._peers.names([self._rank]), self._peers.names([rank])
            raise CollectiveMismatchError(
                [self._peers.number(rank)],
                f"{other} calls {describe(theirs)}, but {me} calls {describe(self._call)}"
                + (f" and wants {describe(wanted)}" if wanted != self._call else ""),
            )

    def compare_sizes(self, rank: int, theirs: int, mine: int) -> None:
        """Checks that this rank wants so many bytes of another as that one has for it."""
        if theirs != mine:
            me, other = self._peers.names([self._rank]), self._peers.names([rank])
            raise CollectiveMismatchError(
                [self._peers.number(rank)],
                f"{other} calls {self._operation} with {theirs} bytes for {me}, which takes {mine} bytes",
            )

    def post_reduced(self) -> None:
        """Says that this rank has reduced its part of the slots."""
        self._signals.post(self._layout.reduced(self._rank), self._round)

    def read_reduced(self) -> None:
        """Waits until all ranks have reduced their parts."""
        self._wait(self._layout.reduced(0), self._others, self._round)

    def close(self) -> None:
        """Ends the round on this rank, which reads the slots no more."""
        self._signals.post(self._layout.done(self._rank), self._round)

    def _wait(self, first: int, ranks: Sequence[int], value: int) -> None:
        words = self._words
        for rank in ranks:
            if words[(first + rank) * (LINE // _WORD)] < value:
                self._awaited = (ranks, first, value)
                self._signals.wait(first + rank, value, self._look_around)

    def _look_around(self) -> None:
        """Raises if there is no use in waiting any longer."""
        self._peers.check()
        ranks, first, value = self._awaited
        # Who is gone but through with this round, is not missed in it.
        unfinished = [rank for rank in self._others if self._signals.value(self._layout.done(rank)) < self._round]
        lost = self._peers.lost(unfinished)
        late = [rank for rank in ranks if self._signals.value(first + rank) < value]
        if not late:
            return
        if lost is not None:
            raise lost
        if time.monotonic() > self._deadline:
            raise CollectiveTimeoutError(self._operation, self._seconds, self._peers.names(late))
