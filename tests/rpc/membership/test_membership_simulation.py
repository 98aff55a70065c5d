"""Joins, losses, evictions and rejoins of many simulated workers end in one membership, at a bounded cost.

`make memberships` runs longer schedules, and groups of 1,000 workers.
"""

import math
import os
from collections.abc import Callable

import pytest

from tests.rpc.membership.membership_simulation import SimulatedGroup, SimulatedWorker

SCHEDULES = int(os.environ.get("GRADWIRE_MEMBERSHIPS", "3"))
WORKERS = int(os.environ.get("GRADWIRE_MEMBERSHIP_WORKERS", "24"))
EVENTS = min(WORKERS, 60)

PEERS = 4
"""Workers to which each one of a static group connects by itself."""

SHORT_S = (6.0, 40.0)
LONG_S = (100.0, 200.0)
"""Seconds that a worker is cut off: less than the lease, or more."""

MESSAGES_PER_EVENT = 4.0
"""Messages that an event may cost, times n log2 n for n workers."""


class Schedule:
    """Random events of one group. Most begin before the last one has had all of its effects."""

    def __init__(self, group: SimulatedGroup) -> None:
        self.group = group
        self.chance = group.chance
        self.cut_off: set[int] = set()
        """The ids of the workers that were, or are, cut off."""
        self.long_silent: set[int] = set()
        """Those of the workers that were cut off for longer than the lease."""
        self._names = 0

    def begin(self, count: int) -> None:
        """Connects the workers of a static group, or has so many join a dynamic one, some of them at once."""
        group = self.group
        if group.size:
            for worker in group.living:
                for other in self.chance.sample(group.living, PEERS):
                    if other is not worker:
                        group.dial(worker, other)
        while len(group.living) < count:
            self.join()
        group.pass_time(1.0)

    def run(self, events: int) -> None:
        for _ in range(events):
            self.chance.choice([self.join, self.join, self.kill, self.leave, self.cut])()
            self.group.pass_time(self.chance.choice([0.0, 0.01, 1.0, 20.0]))
        self.group.pass_time(LONG_S[1] + 100.0)  # all are reached again, or evicted
        for worker in self.group.living:
            if worker.is_evicted():
                self.group.kill(worker)
        self.join()
        self.group.pass_time(10.0)

    def join(self) -> None:
        """Has one or two workers join, or take their places again."""
        group = self.group
        if group.size:
            alive = {worker.info.id for worker in group.living}
            free = [rank for rank in range(group.size) if rank not in alive]
            if not free:
                self.kill()
                return
            rank = self.chance.choice(free)
            entering = [group.enter(f"worker{rank}", rank)]
        else:
            entering = [group.enter(self._new_name()) for _ in range(self.chance.choice([1, 2]))]
        self.chance.shuffle(entering)
        for worker in entering:
            group.greet(worker)

    def _new_name(self) -> str:
        self._names += 1
        return f"worker{self._names}"

    def kill(self) -> None:
        if worker := self._pick():
            self.group.kill(worker)

    def leave(self) -> None:
        if self.group.size:
            self.kill()
        elif worker := self._pick():
            self.group.leave(worker)

    def cut(self) -> None:
        """Cuts a worker off for some time, if most others are not."""
        group, worker = self.group, self._pick()
        if worker is None or 4 * sum(not each.is_plugged for each in group.living) >= len(group.living):
            return
        is_long = self.chance.random() < 0.5
        self.cut_off.add(worker.info.wire_id)
        if is_long:
            self.long_silent.add(worker.info.wire_id)
        group.unplug(worker)
        group.loop.call_later(self.chance.uniform(*(LONG_S if is_long else SHORT_S)), group.plug_in, worker)

    def _pick(self) -> SimulatedWorker | None:
        """Returns a worker that was never cut off; None if there would be too few others."""
        sound = [worker for worker in self.group.living if worker.info.wire_id not in self.cut_off]
        return self.chance.choice(sound) if 2 * len(sound) > WORKERS else None


def check_membership(group: SimulatedGroup, may_be_evicted: set[int]) -> None:
    """Checks that all living workers have the same members: themselves."""
    living = group.living
    version = living[0].roster.version
    departed = living[0].roster.departed()
    names = [worker.info.name for worker in living]
    assert len(set(names)) == len(names)
    for worker in living:
        assert worker.roster.version == version
        assert not worker.is_evicted()
        for other in living:
            assert worker.peers.by_name[other.info.name].info == other.info
            assert worker.peers.of(other.info).end is None
        known = worker.peers.by_id.keys()
        assert all(worker.peers.by_id[wire_id].end is not None for wire_id in departed if wire_id in known)
        assert {worker.info.wire_id for worker in living} <= {
            each.info.wire_id for each in worker.roster.members()
        }
    assert {wire_id for wire_id, each in departed.items() if each.evicted} <= may_be_evicted


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_random_events_end_in_one_membership(kind, seed):
    with SimulatedGroup(seed, WORKERS if kind == "static" else 0).installed() as group:
        schedule = Schedule(group)
        schedule.begin(WORKERS)
        schedule.run(EVENTS)
        check_membership(group, schedule.long_silent)


def test_a_member_that_left_before_it_was_connected_is_no_member():
    """Its goodbye reaches those that it is connected to; others read that it has left."""
    with SimulatedGroup(0).installed() as group:
        a = group.join("a")
        group.unplug(a)
        b = group.join("b")  # which a does not admit
        group.plug_in(a)
        a.roster.catch_up()
        a.follower.follow()
        assert not a.peers.of(b.info).has_connected
        group.leave(b)
        a.evictions.read()
        group.pass_time(1.0)
        end = a.peers.of(b.info).end
        assert end is not None
        assert end.orderly


def test_workers_that_are_cut_off_one_after_the_other_stay_members():
    """These two do not hear of each other for longer than a lease, but each is away for a shorter time."""
    with SimulatedGroup(0, 6).installed() as group:
        for one in group.living:
            for other in group.living:
                if one.info.id < other.info.id:
                    group.dial(one, other)
        group.pass_time(1.0)
        first, second = group.living[:2]
        for seconds, change in [
            (40.0, lambda: group.unplug(first)),
            (5.0, lambda: group.unplug(second)),
            (35.0, lambda: group.plug_in(first)),
            (30.0, lambda: group.plug_in(second)),
        ]:
            change()
            group.pass_time(seconds)
        check_membership(group, set())


def _events(group: SimulatedGroup) -> list[tuple[str, Callable[[], object]]]:
    """Returns one event of each kind, to run in this order."""
    killed, silent = (group.workers[each] for each in sorted(group.workers)[1:3])

    def evict() -> None:
        group.unplug(silent)
        group.pass_time(LONG_S[0])

    return [
        ("a loss", lambda: group.kill(killed)),
        ("a join", lambda: group.join(killed.info.name, killed.info.id if group.size else -1)),
        ("an eviction", evict),
        ("a return", lambda: group.plug_in(silent)),
    ]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_messages_of_an_event_do_not_grow_faster_than_n_log_n(kind, capsys):
    for size in (WORKERS // 3, WORKERS):
        with SimulatedGroup(0, size if kind == "static" else 0).installed() as group:
            schedule = Schedule(group)
            schedule.begin(size)
            for name, event in _events(group):
                messages, operations = group.messages, group.store_operations
                event()
                group.pass_time(20.0)
                messages, operations = group.messages - messages, group.store_operations - operations
                with capsys.disabled():
                    if "GRADWIRE_MEMBERSHIPS" in os.environ:
                        print(f"{kind}, {size} workers, {name}: {messages} messages, {operations} of the store")
                assert messages <= MESSAGES_PER_EVENT * size * math.log2(size)
