"""The plan of a worker decides when rounds go through a process group, and when the worker abandons its group."""

import threading
from collections.abc import Iterator

import pytest
from gradwire.c10d import HashStore
from gradwire.errors import ProcessGroupError
from gradwire.rpc.collectives.group_rounds import (
    NO_GROUP_NEXT,
    NO_STATUS,
    GroupRounds,
    MemberStatus,
    NextRound,
    plan_next_round,
)

from tests.remote_functions import wait_until
from tests.rpc.all_gathers import AT_ONCE, MIB


@pytest.fixture
def both() -> Iterator[list[GroupRounds]]:
    """Returns those of two workers, whose group formed after round 0 and has been used in round 2."""
    store = HashStore()
    both = [GroupRounds(me, AT_ONCE, MIB) for me in (0, 1)]
    for each in both:
        each.open(store, lambda _members: True)
    for each in both:
        assert each.start_round((0, 1), 0) is None
        assert each.status((0, 1)) == MemberStatus(-1, is_formed=False, is_ready=True)
        each.apply_result((0, 1), 0, (0, 1), NextRound(0, through_group=False))
    for each in both:
        wait_until(lambda each=each: each.status((0, 1)).is_formed)
        assert each.start_round((0, 1), 1) is None
        each.apply_result((0, 1), 1, (0, 1), NextRound(0, through_group=True))
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: gather_in(both[i], 2)})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {me: {0: b"0", 1: b"1"} for me in (0, 1)}
    yield both
    for each in both:
        each.close()


def gather_in(rounds: GroupRounds, number: int) -> dict[int, bytes] | None:
    group = rounds.start_round((0, 1), number)
    assert group is not None
    values = group.all_gather(number, memoryview(b"%d" % rounds._me), 10.0)
    rounds.apply_result((0, 1), number, (0, 1), NextRound(0, through_group=True))
    return values


def assert_abandoned(both: list[GroupRounds], number: int) -> None:
    """Checks that the first worker's group has ended, and that the second worker notices."""
    first, second = both
    assert first.status((0, 1)).generation == NO_STATUS.generation
    assert first.formed_groups == 0
    group = second.start_round((0, 1), number)
    assert group is not None
    with pytest.raises(ProcessGroupError):
        group.all_gather(number, memoryview(b"1"), 10.0)
    assert not group.is_formed


def test_a_worker_without_a_result_abandons_its_group(both):
    assert both[0].start_round((0, 1), 4) is None
    assert_abandoned(both, 3)


@pytest.mark.parametrize(
    ("present", "plan"),
    [
        ((0, 1), NO_GROUP_NEXT),
        ((0, 1), NextRound(7, through_group=True)),
        ((0,), NextRound(0, through_group=True)),
    ],
)
def test_a_worker_abandons_its_group_if_the_others_have_another(both, present, plan):
    both[0].start_round((0, 1), 3)
    both[0].apply_result((0, 1), 3, present, plan)
    assert_abandoned(both, 3)


def test_another_group_takes_twice_as_many_rounds(both):
    first = both[0]
    first.end_groups_of(1)
    ready = []
    for number in range(3, 7):
        ready.append(first.status((0, 1)).is_ready)
        first.apply_result((0, 1), number, (0, 1), NO_GROUP_NEXT)
    assert ready == [False, True, True, True]


def test_plans():
    ready = MemberStatus(-1, is_formed=False, is_ready=True)
    forming, formed = (
        MemberStatus(7, is_formed=False, is_ready=False),
        MemberStatus(7, is_formed=True, is_ready=False),
    )
    assert plan_next_round(9, [ready, ready]) == NextRound(9, through_group=False)
    assert plan_next_round(9, [ready, NO_STATUS]) == NO_GROUP_NEXT
    assert plan_next_round(9, [forming, formed]) == NextRound(7, through_group=False)
    assert plan_next_round(9, [formed, formed]) == NextRound(7, through_group=True)
    assert plan_next_round(9, [formed, ready]) == NO_GROUP_NEXT
    assert plan_next_round(9, [formed, formed._replace(generation=8)]) == NO_GROUP_NEXT
