"""The log of joins and leaves of a dynamic group."""

import pytest
from gradwire.c10d import HashStore
from gradwire.errors import RendezvousError
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.membership.members import Member
from gradwire.rpc.membership.roster import RosterLog
from hypothesis import given
from hypothesis import strategies as st


def member(name: str, identifier: int) -> Member:
    return Member(WorkerInfo(name, identifier), f"127.0.0.1:{1000 + identifier}", 0)


def names(log: RosterLog) -> list[str]:
    return sorted(each.info.name for each in log.members())


def test_of_two_concurrent_joins_the_slower_one_learns_of_the_other():
    store = HashStore()
    a, b = RosterLog(store), RosterLog(store)
    assert a.join(member("a", 0))
    assert not b.join(member("b", 0))
    assert names(b) == ["a"]
    assert b.join(member("b", 1))
    a.catch_up()
    assert names(a) == names(b) == ["a", "b"]


def test_names_can_be_used_again_and_ids_cannot():
    log = RosterLog(HashStore())
    for name, identifier in (("a", 0), ("b", 1)):
        assert log.join(member(name, identifier))
    with pytest.raises(RendezvousError, match="worker name 'a' is not unique: the member with id 0 at 127"):
        log.choose("a", 7)
    log.leave(0)
    assert log.choose("a", -1) == WorkerInfo("a", 2)
    with pytest.raises(RendezvousError, match="rank 0 is taken: .* leave rank out, or take 2"):
        log.choose("a", 0)


def test_an_empty_group_begins_a_new_epoch():
    log = RosterLog(HashStore())
    assert log.join(member("a", 3))
    log.leave(3)
    log.leave(3)  # does nothing
    assert (log.epoch, log.choose("a", 3)) == (1, WorkerInfo("a", 3))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5)), max_size=40))
def test_all_workers_agree(steps):
    """Whether or not the workers know the latest entry, they end with the same members, each name and id once."""
    store = HashStore()
    logs = [RosterLog(store) for _ in range(3)]
    for who, joins, number in steps:
        log = logs[who]
        if joins:
            try:
                log.join(Member(log.choose(f"worker{number}", -1), "127.0.0.1:1", 0))
            except RendezvousError:
                log.catch_up()
        else:
            log.leave(number)
    for log in logs:
        log.catch_up()
    assert logs[0].entries() == logs[1].entries() == logs[2].entries()
    assert logs[0].members() == logs[1].members() == logs[2].members()
    assert len(set(names(logs[0]))) == len(logs[0].members())
