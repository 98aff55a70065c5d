"""Which way gatherings of the same workers go: by messages, or through a process group of theirs.

A group is made for a set of workers that has gathered some times, in the background. With its value by messages
each member tells how far it is, and the leader makes a plan of that for the next round, which all get with the
result. So all that have the result agree on when a group begins to form, who is in it, and from which round on it
is used. Who has not got the result gives its group up, which the others notice.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from ...c10d.group_membership import GroupSpec
from ...c10d.torch_types import TorchStore
from ...errors import GroupAbortedError
from ..contracts.options import AllGatherOptions
from .all_gather_group import AllGatherGroup

__all__ = ["NO_STATUS", "GroupRounds", "MemberStatus", "NextRound", "plan_next_round"]

Members = tuple[int, ...]

NO_GROUP = -1

MAX_BACKOFF = 64
"""After each group that has come to its end, a set waits for twice as many rounds as before, up to so many times
the first number."""

log = logging.getLogger(__name__)


class MemberStatus(NamedTuple):
    """What a member tells with its value."""

    generation: int
    """Of its group: the round after which that began to form; NO_GROUP if there is none."""
    formed: bool
    ready: bool
    """Would it form one?"""


NO_STATUS = MemberStatus(NO_GROUP, formed=False, ready=False)


class NextRound(NamedTuple):
    """What comes with the result of a round."""

    generation: int
    """Of the group that all are to have, others are given up. If it is this round, it is to be formed now."""
    formed: bool
    """Does the next round go through it?"""


NO_GROUP_NEXT = NextRound(NO_GROUP, formed=False)


def plan_next_round(number: int, statuses: Collection[MemberStatus]) -> NextRound:
    """What follows on a round in which the members told this."""
    generations = {status.generation for status in statuses}
    if len(generations) > 1:
        return NO_GROUP_NEXT
    (generation,) = generations
    if generation != NO_GROUP:
        return NextRound(generation, formed=all(status.formed for status in statuses))
    return NextRound(number, formed=False) if all(status.ready for status in statuses) else NO_GROUP_NEXT


@dataclass(slots=True)
class _Set:
    """What is known of the gatherings of one set of workers."""

    needed: int
    """Rounds by messages before a group is formed."""
    rounds: int = 0
    last: int = -1
    """The last round whose result is known here."""
    through_group: int = -1
    """The round that goes through the group."""
    group: AllGatherGroup | None = None
    used: int = 0
    unformable: Members = ()
    """Who could not form one."""


@final
class GroupRounds:
    """The groups of one agent, by members. Without a store there are none."""

    def __init__(self, me: int, options: AllGatherOptions, max_bytes: int) -> None:
        """Args: whose; how to behave; bytes of a value that is accepted."""
        self._me = me
        self._options = options
        self._most_bytes = max_bytes
        self._store: TorchStore | None = None
        self._lock = threading.Lock()
        self._sets: dict[Members, _Set] = {}
        self._uses = itertools.count()
        self._alive: weakref.WeakSet[AllGatherGroup] = weakref.WeakSet()
        """Given up or not."""

    def open(self, store: TorchStore) -> None:
        """Groups may form from now on, which meet at this store."""
        if self._options.enabled:
            self._store = store

    @property
    def formed(self) -> int:
        """How many groups have come together, and are there still."""
        with self._lock:
            return sum(each.group is not None and each.group.formed for each in self._sets.values())

    def begin(self, members: Members, number: int) -> AllGatherGroup | None:
        """This worker begins a round; the group that it goes through, None if it goes by messages."""
        with self._lock:
            found = self._sets.get(members)
            if found is None or found.group is None:
                return None
            if found.last == number - 1:
                found.used = next(self._uses)
                return found.group if found.through_group == number else None
        self.abandon(members)  # the others may know from the round before that they all go through a group
        return None

    def status(self, members: Members) -> MemberStatus:
        """What to tell with a value."""
        with self._lock:
            found = self._sets.get(members)
            if self._store is None or len(members) < 2:
                return NO_STATUS
            if found is None:
                found = self._sets[members] = _Set(self._options.after)
            if found.group is not None:
                return MemberStatus(found.group.generation, found.group.formed, ready=False)
            ready = not found.unformable and found.rounds + 1 >= found.needed
            return MemberStatus(NO_GROUP, formed=False, ready=ready)

    def apply_result(self, members: Members, number: int, present: Members, plan: NextRound) -> None:
        """The result of a round is known: who is in it, and what follows on it."""
        ended: list[AllGatherGroup] = []
        with self._lock:
            found = self._sets.get(members)
            if found is None or number <= found.last:
                return
            found.last = number
            if found.unformable != present:  # whoever is gone may be why
                found.unformable = ()
            group = found.group
            if group is not None and (group.generation, group.members) != (plan.generation, present):
                ended += self._take_group(found)
            if found.group is not None:
                if plan.formed and found.group.formed:
                    found.through_group = number + 1
            else:
                found.rounds += 1
                if plan.generation == number and self._store is not None and len(present) > 1:
                    ended += self._form(found, members, number, present, self._store)
        _end(ended)

    def abandon(self, members: Members) -> None:
        """Ends the group of these, if there is one."""
        with self._lock:
            found = self._sets.get(members)
            ended = self._take_group(found) if found is not None else []
        _end(ended)

    def on_worker_lost(self, worker: int) -> None:
        """Ends the groups that a lost worker is in."""
        with self._lock:
            broken = [members for members in self._sets if worker in members]
        for members in broken:
            self.abandon(members)

    def close(self) -> None:
        """Ends all groups, and waits for their threads."""
        groups = list(self._alive)  # before the last references to them go
        with self._lock:
            self._store = None
            self._sets.clear()
        for group in groups:
            group.close()

    def _form(
        self, found: _Set, members: Members, number: int, present: Members, store: TorchStore
    ) -> list[AllGatherGroup]:
        """Begins to form a group. Called with the lock; returns those to be ended instead."""
        ended = []
        others = [each for each in self._sets.values() if each.group is not None]
        if len(others) >= self._options.max_groups:
            idle = [each for each in others if each.group is not None and not each.group.busy]
            if not idle:
                return []
            ended = self._take_group(min(idle, key=lambda each: each.used))
        name = f"gather-{number}-{'.'.join(map(str, members))}"
        spec = GroupSpec(store, name, present, self._me)
        found.group = AllGatherGroup(
            number, spec, self._most_bytes, lambda group, error: self._failed(members, group, error)
        )
        found.used = next(self._uses)
        self._alive.add(found.group)
        found.group.start()
        return ended

    def _failed(self, members: Members, group: AllGatherGroup, error: Exception) -> None:
        """A group has not come together. Called on its thread."""
        with self._lock:
            found = self._sets.get(members)
            if found is None or found.group is not group:
                return
            self._take_group(found)
            if isinstance(error, GroupAbortedError):
                return
            found.unformable = group.members
        log.warning(
            "worker %d cannot form a process group with workers %s, so what they gather goes by messages: %s",
            self._me,
            ", ".join(map(str, members)),
            error,
        )

    def _take_group(self, found: _Set) -> list[AllGatherGroup]:
        """A set has its group no more. Called with the lock; returns what is to be ended without it."""
        if found.group is None:
            return []
        group, found.group = found.group, None
        found.through_group = -1
        found.rounds = 0
        found.needed = min(2 * found.needed, MAX_BACKOFF * self._options.after)
        return [group]


def _end(groups: Sequence[AllGatherGroup]) -> None:
    for group in groups:
        group.end()
