"""When gatherings go through a process group: plans, and who gives its group up."""

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
def paths() -> Iterator[list[GroupRounds]]:
    """Those of two workers, whose group was formed after round 0 and has been used in round 2."""
    store = HashStore()
    both = [GroupRounds(me, AT_ONCE, MIB) for me in (0, 1)]
    for each in both:
        each.open(store)
    for each in both:
        assert each.begin((0, 1), 0) is None
        assert each.status((0, 1)) == MemberStatus(-1, formed=False, ready=True)
        each.learn((0, 1), 0, (0, 1), NextRound(0, formed=False))
    for each in both:
        wait_until(lambda each=each: each.status((0, 1)).formed)
        assert each.begin((0, 1), 1) is None
        each.learn((0, 1), 1, (0, 1), NextRound(0, formed=True))
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


def gather_in(paths: GroupRounds, number: int) -> dict[int, bytes] | None:
    group = paths.begin((0, 1), number)
    assert group is not None
    values = group.all_gather(number, memoryview(b"%d" % paths._me), 10.0)
    paths.learn((0, 1), number, (0, 1), NextRound(0, formed=True))
    return values


def assert_given_up(paths: list[GroupRounds], number: int) -> None:
    """The first one's group has ended; the second one notices."""
    first, second = paths
    assert first.status((0, 1)).generation == NO_STATUS.generation
    assert first.formed == 0
    group = second.begin((0, 1), number)
    assert group is not None
    with pytest.raises(ProcessGroupError):
        group.all_gather(number, memoryview(b"1"), 10.0)
    assert not group.formed


def test_who_has_not_got_a_result_gives_its_group_up(paths):
    assert paths[0].begin((0, 1), 4) is None
    assert_given_up(paths, 3)


@pytest.mark.parametrize(
    ("present", "plan"),
    [((0, 1), NO_GROUP_NEXT), ((0, 1), NextRound(7, formed=True)), ((0,), NextRound(0, formed=True))],
)
def test_who_learns_that_the_others_have_another_group_gives_its_own_up(paths, present, plan):
    paths[0].begin((0, 1), 3)
    paths[0].learn((0, 1), 3, present, plan)
    assert_given_up(paths, 3)


def test_another_group_takes_twice_as_many_rounds(paths):
    first = paths[0]
    first.on_worker_lost(1)
    ready = []
    for number in range(3, 7):
        ready.append(first.status((0, 1)).ready)
        first.learn((0, 1), number, (0, 1), NO_GROUP_NEXT)
    assert ready == [False, True, True, True]


def test_plans():
    ready = MemberStatus(-1, formed=False, ready=True)
    forming, formed = MemberStatus(7, formed=False, ready=False), MemberStatus(7, formed=True, ready=False)
    assert plan_next_round(9, [ready, ready]) == NextRound(9, formed=False)
    assert plan_next_round(9, [ready, NO_STATUS]) == NO_GROUP_NEXT
    assert plan_next_round(9, [forming, formed]) == NextRound(7, formed=False)
    assert plan_next_round(9, [formed, formed]) == NextRound(7, formed=True)
    assert plan_next_round(9, [formed, ready]) == NO_GROUP_NEXT
    assert plan_next_round(9, [formed, formed._replace(generation=8)]) == NO_GROUP_NEXT
