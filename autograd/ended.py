"""Which contexts have ended, so that a late message does not open one of them again.

A worker creates contexts with ascending ids. So it can say which of its contexts have ended, however many, by the
next id and the few that are open: all others below have. Another worker remembers the ends that it learns of one
by one, and after every `ASK_AFTER` of them asks the creator, whose answer replaces what was remembered.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from .context import creator_of

T = TypeVar("T")

__all__ = ["ASK_AFTER", "EndedContexts", "OpenContexts"]

ASK_AFTER = 1024
"""Ends of contexts of one creator after which it is asked."""

MAX_NAMED = 1 << 14
"""Open contexts that a creator names in one answer. The oldest: it tells nothing about those after them."""

MAX_ENDED = 1 << 16
"""Ends that are remembered of the contexts of one creator, for as long as it does not answer."""

MAX_LEFT = 4096
"""The same of contexts of which a worker that has not created them has told that they have ended."""


@final
@dataclass(frozen=True, slots=True)
class OpenContexts:
    """What a creator tells about its contexts: those with ids below one, except for some, have ended."""

    below: int
    ids: Set[int]

    @classmethod
    def of(cls, ids: Collection[int], following: int) -> "OpenContexts":
        """Makes it from the ids of all open contexts, and the id of the next one."""
        ascending = sorted(ids)
        below = ascending[MAX_NAMED] if len(ascending) > MAX_NAMED else following
        return cls(below, frozenset(ascending[:MAX_NAMED]))

    @classmethod
    def from_payload(cls, payload: object, sender: int) -> "OpenContexts":
        """Returns what a worker has sent. Raises ValueError if it is malformed, or not about its own contexts."""
        match payload:
            case (int(below), frozenset(ids)) if len(ids) <= MAX_NAMED and creator_of(below) == sender:
                if all(type(each) is int for each in ids):
                    return cls(below, ids)
        raise ValueError("malformed message: it does not tell which contexts are open")

    def exclude(self, identifier: int) -> bool:
        """Returns whether a context of the creator has ended."""
        return identifier < self.below and identifier not in self.ids


@dataclass(slots=True)
class _OfCreator:
    told: OpenContexts
    """What the creator has told last."""
    ended: OrderedDict[int, str | None] = field(default_factory=OrderedDict)
    """The contexts that have ended besides; and why, if another worker has lost the creator."""
    ends: int = 0
    """How many ends this worker has learnt of."""


@final
class EndedContexts:
    """The contexts that have ended on one worker. Used by one thread at a time."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        """Args: ask: has a worker tell which of its contexts are open: see `learn`. Must not block."""
        self._ask = ask
        self._creators: dict[int, _OfCreator] = {}
        self._left: dict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """The contexts that have ended for another worker, which has not created them, by that worker."""

    def __len__(self) -> int:
        """The number of ends that are remembered one by one."""
        return sum(len(each.ended) for each in self._creators.values()) + sum(map(len, self._left.values()))

    def has_ended(self, creator: int, identifier: int) -> bool:
        """Returns whether a context of this creator has ended."""
        of = self._creators.get(creator)
        return of is not None and (identifier in of.ended or of.told.exclude(identifier))

    def has_left(self, worker: int, identifier: int) -> bool:
        """Returns whether a context has ended for another worker, which may not have created it."""
        return worker in self._left and identifier in self._left[worker]

    def add(self, creator: int, identifier: int, why: str | None = None) -> None:
        """Notes that a context of this creator has ended; and why, if the creator is lost for another worker."""
        of = self._of(creator)
        if (why or identifier not in of.ended) and not of.told.exclude(identifier):
            _remember(of.ended, identifier, MAX_ENDED, why)
        self._count(of, creator)

    def leave(self, worker: int, creator: int, identifier: int) -> None:
        """Notes that a context has ended for another worker, which has not created it."""
        if self.has_ended(creator, identifier):
            return
        _remember(self._left[worker], identifier, MAX_LEFT, None)
        if (of := self._creators.get(creator)) is not None:
            self._count(of, creator)

    def why(self, creator: int, identifier: int) -> str | None:
        """Returns why a context of this creator has ended, if `add` has noted that."""
        of = self._creators.get(creator)
        return None if of is None else of.ended.get(identifier)

    def know(self, creator: int) -> None:
        """Notes that a worker creates contexts of which messages come."""
        if creator not in self._creators:
            self._of(creator)

    def discard(self, worker: int) -> None:
        """Discards which contexts have ended for a worker that is lost."""
        self._left.pop(worker, None)

    def learn(self, creator: int, told: OpenContexts) -> None:
        """Takes what a creator tells about its contexts in the place of what was remembered."""
        of = self._of(creator)
        if told.below < of.told.below:
            return  # it was sent before
        if told.below == of.told.below:  # this one, or the last one, may be the older: no context opens again
            told = OpenContexts(told.below, told.ids & of.told.ids)
        of.told = told
        remembered: tuple[OrderedDict[int, Any], ...] = (of.ended, *self._left.values())
        for ended in remembered:
            for identifier in [each for each in ended if creator_of(each) == creator and told.exclude(each)]:
                del ended[identifier]

    def _of(self, creator: int) -> _OfCreator:
        if creator not in self._creators:
            self._creators[creator] = _OfCreator(OpenContexts(0, frozenset()))
        return self._creators[creator]

    def _count(self, of: _OfCreator, creator: int) -> None:
        of.ends += 1
        if of.ends % ASK_AFTER == 0:
            self._ask(creator)


def _remember(ended: OrderedDict[int, T], identifier: int, limit: int, note: T) -> None:
    ended[identifier] = note
    while len(ended) > limit:
        ended.popitem(last=False)
