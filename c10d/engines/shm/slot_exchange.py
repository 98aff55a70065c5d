"""Rounds in which ranks exchange data through slots in shared memory; collectives consist of them.

Each rank has two slots, for even and odd rounds. In a round some ranks fill slots and post the number of the
round; others wait for that number and read the slots; all mark the round as done when they do not read its slots
any more. A slot is filled again two rounds later, once all ranks are done with the earlier round, so a rank is at
most one round ahead of the slowest. All ranks go through the same rounds.

With the number of the round a rank posts the fingerprint of its call (fingerprint.py), which readers compare with
their own.
"""

import time
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ....errors import CollectiveTimeoutError
from ..fingerprint import mismatch, operation_of
from .doorbells import LINE_WORDS
from .layout import SLOT_BYTES
from .peers import Peers
from .segment import Segment

__all__ = ["SlotExchange"]

_FINGERPRINT_WORD = 2
"""In the line of a `filled` doorbell, the first of two words with fingerprints, for even and odd rounds."""

_MAX_CACHED_VIEWS = 128


@final
class SlotExchange:
    """The slots of a group, used by one thread at a time."""

    def __init__(self, segment: Segment, peers: Peers) -> None:
        layout = self._layout = segment.layout
        self._doorbells = segment.doorbells
        self._words = segment.doorbells.words
        self._peers = peers
        self._rank = peers.rank
        self._ranks = range(peers.size)
        self._others = [other for other in self._ranks if other != self._rank]
        offsets = [[layout.slot_offset(each, parity) for each in self._ranks] for parity in (0, 1)]
        self._addresses = [[segment.address + offset for offset in row] for row in offsets]
        self._slots = [[segment.bytes[offset : offset + SLOT_BYTES] for offset in row] for row in offsets]
        self._views: dict[tuple[int, torch.dtype, int, int], list[Tensor]] = {}
        self._round = 0
        self._parity = 0
        self._round_done_by_all = 0  # as far as this rank has checked
        # The operation in flight:
        self._fingerprint = 0
        self._timeout = 0.0
        self._deadline = 0.0
        self._wait_target: tuple[Sequence[int], int, int] = ((), 0, 0)  # ranks, first doorbell, value

    def start_operation(self, timeout: float, fingerprint: int) -> None:
        """Sets the operation that the following rounds belong to, with the fingerprint of this rank's call."""
        self._peers.check()
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._fingerprint = fingerprint

    def start_round(self) -> None:
        """Starts a round: waits until all ranks are done with the last round that used the same slots."""
        number = self._round = self._round + 1
        self._parity = number & 1
        if self._round_done_by_all < number - 2:
            self._wait_for(self._layout.done_doorbell(0), self._others, number - 2)
            self._round_done_by_all = number - 2

    def slot_address(self, rank: int) -> int:
        """Returns the address of a rank's slot in this round."""
        return self._addresses[self._parity][rank]

    def slot_views(self, dtype: torch.dtype, start: int, stop: int) -> list[Tensor]:
        """Returns, for every rank's slot of this round, a view of its elements from `start` to `stop`.

        Views are cached.
        """
        key = (self._parity, dtype, start, stop)
        views = self._views.get(key)
        if views is None:
            if len(self._views) == _MAX_CACHED_VIEWS:
                self._views.clear()
            views = [slot.view(dtype)[start:stop] for slot in self._slots[self._parity]]
            self._views[key] = views
        return views

    def post_filled(self) -> None:
        """Tells the other ranks that this rank has filled its slots of this round."""
        doorbell = self._layout.filled_doorbell(self._rank)
        at = doorbell * LINE_WORDS + self._parity
        self._words[at + _FINGERPRINT_WORD] = self._fingerprint
        self._doorbells.ring(doorbell, self._round)

    def wait_and_check(self, ranks: Sequence[int]) -> None:
        """Waits until these ranks have filled their slots, and checks that they call the same as this one."""
        self.wait_filled(ranks)
        for rank in ranks:
            self.check_fingerprint(rank, self._fingerprint)

    def wait_filled(self, ranks: Sequence[int]) -> None:
        """Waits until these ranks have filled their slots."""
        self._wait_for(self._layout.filled_doorbell(0), ranks, self._round)

    def check_fingerprint(self, rank: int, expected: int, theirs: int | None = None) -> None:
        """Raises CollectiveMismatchError if a rank that has filled its slot has not the expected fingerprint.

        Its fingerprint is `theirs`, or else what it has posted.
        """
        if theirs is None:
            at = self._layout.filled_doorbell(rank) * LINE_WORDS + _FINGERPRINT_WORD + self._parity
            theirs = self._words[at]
        if theirs != expected:
            ranks = self._peers.global_ranks
            raise mismatch(ranks[rank], theirs, ranks[self._rank], self._fingerprint, expected)

    def post_reduced(self) -> None:
        """Tells the other ranks that this rank has reduced its part of the slots."""
        self._doorbells.ring(self._layout.reduced_doorbell(self._rank), self._round)

    def wait_reduced(self) -> None:
        """Waits until all ranks have reduced their parts of the slots."""
        self._wait_for(self._layout.reduced_doorbell(0), self._others, self._round)

    def end_round(self) -> None:
        """Tells the other ranks that this rank does not read the slots of this round any more."""
        self._doorbells.ring(self._layout.done_doorbell(self._rank), self._round)

    def _wait_for(self, first: int, ranks: Sequence[int], value: int) -> None:
        """Waits until the doorbells of these ranks, which start at `first`, are at least `value`."""
        words = self._words
        for rank in ranks:
            if words[(first + rank) * LINE_WORDS] < value:
                self._wait_target = (ranks, first, value)
                self._doorbells.wait_for(first + rank, value, self._check_wait)

    def _check_wait(self) -> None:
        """Raises if this rank has left, a rank that is waited for is lost, or the operation has timed out."""
        self._peers.check()
        ranks, first, value = self._wait_target
        # A rank that left after it was done with this round is not needed in it.
        unfinished = [
            rank for rank in self._others if self._doorbells.value(self._layout.done_doorbell(rank)) < self._round
        ]
        lost = self._peers.find_lost(unfinished)
        late = [rank for rank in ranks if self._doorbells.value(first + rank) < value]
        if not late:
            return
        if lost is not None:
            raise lost
        if time.monotonic() > self._deadline:
            raise CollectiveTimeoutError(
                operation_of(self._fingerprint), self._timeout, self._peers.describe(late)
            )
