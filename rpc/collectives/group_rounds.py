"""Decides which all_gather rounds of the same workers go by messages, and which through a process group of theirs.

Workers that have run some rounds by messages form a process group in the background. In each such round every
member sends its status with its value, and the leader derives from all statuses how the next round goes; the
members get that with the result. So all members that have the result agree on when a group begins to form, who
is in it, and from which round on it is used. A member without the result abandons its group, which the other
members notice.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, final

from ...c10d.group_membership import GroupSpec
from ...c10d.torch_types import TorchStore
from ...errors import GroupAbortedError
from ..contracts.collective_options import AllGatherOptions
from ..contracts.exposure import message_value
from .all_gather_group import AllGatherGroup

__all__ = ["NO_STATUS", "GroupRounds", "MemberStatus", "NextRound", "plan_next_round"]

Members = tuple[int, ...]
"""Worker ids, ascending."""

NO_GROUP = -1
"""The generation of no group."""

NEVER = -1
"""The number of no round."""

MAX_BACKOFF_FACTOR = 64
"""Bounds the backoff. After each group that has ended, the workers run twice as many rounds by messages as
before the last one until they form another group, at most this many times `AllGatherOptions.after`."""

log = logging.getLogger(__name__)


@message_value
class MemberStatus(NamedTuple):
    """The state of a member's process group; sent with its value in a round by messages."""

    generation: int
    """The round after which the member's group began to form; NO_GROUP without a group."""
    is_formed: bool
    """Whether the member has joined its group."""
    is_ready: bool
    """Whether the member, which has no group, would form one."""


NO_STATUS = MemberStatus(NO_GROUP, is_formed=False, is_ready=False)


@message_value
class NextRound(NamedTuple):
    """The decision on the next round; every member gets it with the result of a round."""

    generation: int
    """That of the group which all members are to have; they abandon any other. If it is the number of the round
    that has just ended, the group is to be formed now."""
    through_group: bool
    """Whether the next round goes through that group."""


NO_GROUP_NEXT = NextRound(NO_GROUP, through_group=False)


def plan_next_round(number: int, statuses: Collection[MemberStatus]) -> NextRound:
    """Returns how the next round goes after a round in which the members have sent these statuses.

    Args:
        number: that of the round that has just ended.
        statuses: of all members whose values are in the result.
    """
    generations = {status.generation for status in statuses}
    if len(generations) > 1:
        return NO_GROUP_NEXT
    (generation,) = generations
    if generation != NO_GROUP:
        return NextRound(generation, through_group=all(status.is_formed for status in statuses))
    if all(status.is_ready for status in statuses):
        return NextRound(number, through_group=False)
    return NO_GROUP_NEXT


class _State(Enum):
    """The states of a set of workers, as one worker sees them.

                     all are ready              joined
        ● ─▶ NO_GROUP ───────────▶ FORMING ──────────────▶ FORMED
              ▲  ▲  ▲                │ │                      │
              │  │  └── abandoned ───┘ │ cannot be formed     │
              │  │                     ▼                      │
              │  └─ other members ─ UNFORMABLE                │
              │                                               │
              └────────────────── abandoned ──────────────────┘

    A group is abandoned when the result of a round names another group, none or other members; when a member is
    lost or a result is missed; and when another set needs its place. Rounds go through a FORMED group once a
    result has told that all members have joined it.
    """

    NO_GROUP = auto()
    FORMING = auto()
    FORMED = auto()
    UNFORMABLE = auto()


@dataclass(slots=True)
class _WorkerSet:
    """The state of the rounds of one set of workers."""

    rounds_needed: int
    """Rounds by messages before a group is formed."""
    rounds_by_messages: int = 0
    """The number of rounds since the last group ended."""
    last_result: int = NEVER
    """The last round whose result is known here."""
    next_group_round: int = NEVER
    """The round that goes through the group."""
    group: AllGatherGroup | None = None
    last_use: int = 0
    """The running number, over all sets, of the last round that was begun with the group."""
    unformable: Members = ()
    """The present members that could not form a group."""

    @property
    def state(self) -> _State:
        """The state. A group becomes formed on its own thread."""
        if self.group is not None:
            return _State.FORMED if self.group.is_formed else _State.FORMING
        return _State.UNFORMABLE if self.unformable else _State.NO_GROUP

    def has_group(self, generation: int, present: Members) -> bool:
        """Returns whether the set has the group of this generation, with exactly the members that are present."""
        return self.group is not None and (self.group.generation, self.group.members) == (generation, present)


@final
class GroupRounds:
    """The process groups of one agent, by their members. Without a store there are none."""

    def __init__(
        self, me: int, options: AllGatherOptions, max_value_bytes: int, *, insecure: bool = False
    ) -> None:
        """Makes none yet.

        Args:
            me: this worker's id.
            options: when to form groups.
            max_value_bytes: of a value.
            insecure: whether groups may connect workers on several hosts without credentials.
        """
        self._me = me
        self._insecure = insecure
        self._options = options
        self._max_value_bytes = max_value_bytes
        self._store: TorchStore | None = None
        self._may_form: Callable[[Members], bool]  # set with the store
        self._lock = threading.Lock()
        self._sets: dict[Members, _WorkerSet] = {}
        self._uses = itertools.count()
        self._alive: weakref.WeakSet[AllGatherGroup] = weakref.WeakSet()
        """All groups, abandoned ones too."""

    def open(self, store: TorchStore, may_form: Callable[[Members], bool]) -> None:
        """Allows groups from now on, if the options do.

        Args:
            store: where their members rendezvous.
            may_form: returns whether workers may form a group, by their ids; the same on all workers.
        """
        if self._options.enabled:
            self._store, self._may_form = store, may_form

    @property
    def formed_groups(self) -> int:
        """The number of groups that are formed and still there."""
        with self._lock:
            return sum(each.state is _State.FORMED for each in self._sets.values())

    def start_round(self, members: Members, number: int) -> AllGatherGroup | None:
        """Returns the group that a round goes through; None if it goes by messages.

        A worker that lacks the result of the round before abandons its group: the other members may have learned
        from that result that this round goes through the group.
        """
        with self._lock:
            workers = self._sets.get(members)
            if workers is None or workers.group is None:
                return None
            if workers.last_result == number - 1:
                workers.last_use = next(self._uses)
                return workers.group if workers.next_group_round == number else None
        self.abandon(members)
        return None

    def status(self, members: Members) -> MemberStatus:
        """Returns what to send with a value in a round by messages."""
        with self._lock:
            if self._store is None or len(members) < 2 or not self._may_form(members):
                return NO_STATUS
            workers = self._sets.get(members)
            if workers is None:
                workers = self._sets[members] = _WorkerSet(self._options.after)
            if workers.group is not None:
                return MemberStatus(workers.group.generation, workers.group.is_formed, is_ready=False)
            is_due = workers.rounds_by_messages + 1 >= workers.rounds_needed
            return MemberStatus(NO_GROUP, is_formed=False, is_ready=is_due and workers.state is _State.NO_GROUP)

    def apply_result(self, members: Members, number: int, present: Members, plan: NextRound) -> None:
        """Applies the decision that came with the result of a round: forms, uses or abandons a group.

        The states and transitions are those that `_State` draws.

        Args:
            members: all members of the round.
            number: that of the round.
            present: the members whose values are in the result.
            plan: how the next round goes.
        """
        with self._lock:
            workers = self._sets.get(members)
            if workers is None or number <= workers.last_result:
                return
            workers.last_result = number
            ended = self._leave_outdated_state(workers, present, plan)
            if workers.state in (_State.NO_GROUP, _State.UNFORMABLE):
                workers.rounds_by_messages += 1
                if plan.generation == number and self._store is not None and len(present) > 1:
                    ended += self._form(workers, members, number, present, self._store)
            elif plan.through_group and workers.state is _State.FORMED:
                workers.next_group_round = number + 1
        _end(ended)

    def _leave_outdated_state(
        self, workers: _WorkerSet, present: Members, plan: NextRound
    ) -> list[AllGatherGroup]:
        """Leaves a state that the result of a round contradicts.

        Called with the lock; returns the groups to end.
        """
        match workers.state:
            case _State.UNFORMABLE if workers.unformable != present:
                workers.unformable = ()  # the cause may be a member that is gone
            case _State.FORMING | _State.FORMED if not workers.has_group(plan.generation, present):
                return self._detach_group(workers)
        return []

    def abandon(self, members: Members) -> None:
        """Ends the group of these members, if there is one."""
        with self._lock:
            workers = self._sets.get(members)
            ended = self._detach_group(workers) if workers is not None else []
        _end(ended)

    def abandon_if_used(self, members: Members) -> None:
        """Ends the group of these members if rounds go through it, and not while it forms."""
        with self._lock:
            workers = self._sets.get(members)
            is_used = workers is not None and workers.next_group_round != NEVER
        if is_used:
            self.abandon(members)

    def end_groups_of(self, worker: int) -> None:
        """Ends the groups that a worker is in, which is lost or does not answer. Later rounds may form others."""
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
        self, workers: _WorkerSet, members: Members, number: int, present: Members, store: TorchStore
    ) -> list[AllGatherGroup]:
        """Begins to form a group, if there is room for one. Called with the lock; returns the groups to end."""
        ended = []
        with_groups = [each for each in self._sets.values() if each.group is not None]
        if len(with_groups) >= self._options.max_groups:
            idle = [each for each in with_groups if each.group is not None and not each.group.is_busy]
            if not idle:
                return []
            ended = self._detach_group(min(idle, key=lambda each: each.last_use))
        name = f"all_gather-{number}-{'.'.join(map(str, members))}"
        workers.group = AllGatherGroup(
            number,
            GroupSpec(store, name, present, self._me, insecure=self._insecure),
            self._max_value_bytes,
            lambda group, error: self._on_unformable(members, group, error),
        )
        workers.last_use = next(self._uses)
        self._alive.add(workers.group)
        workers.group.start()
        return ended

    def _on_unformable(self, members: Members, group: AllGatherGroup, error: Exception) -> None:
        """Notes that a group could not be formed. Runs on the group's thread."""
        with self._lock:
            workers = self._sets.get(members)
            if workers is None or workers.group is not group:
                return
            self._detach_group(workers)
            if isinstance(error, GroupAbortedError):
                return
            workers.unformable = group.members
        log.warning(
            "worker %d cannot form a process group with workers %s, so their collectives go by messages: %s",
            self._me,
            ", ".join(map(str, members)),
            error,
        )

    def _detach_group(self, workers: _WorkerSet) -> list[AllGatherGroup]:
        """Takes a set's group away. Called with the lock; returns the groups that are to be ended without it."""
        if workers.group is None:
            return []
        group, workers.group = workers.group, None
        workers.next_group_round = NEVER
        workers.rounds_by_messages = 0
        workers.rounds_needed = min(2 * workers.rounds_needed, MAX_BACKOFF_FACTOR * self._options.after)
        return [group]


def _end(groups: Sequence[AllGatherGroup]) -> None:
    for group in groups:
        group.end()
