"""The log of joins and leaves of a dynamic group."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import reduce

import pytest
from gradwire.c10d import HashStore
from gradwire.errors import RendezvousError
from gradwire.rpc.contracts.roster_version import RosterVersion
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.membership.members import Member
from gradwire.rpc.membership.roster import RosterError
from gradwire.rpc.membership.roster_log import RosterLog
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


def joining(name: str, identifier: int) -> str:
    return json.dumps({"join": asdict(member(name, identifier))})


def version_of(entries: Iterable[str]) -> RosterVersion:
    return reduce(RosterVersion.followed_by, entries, RosterVersion())


@pytest.fixture
def known() -> tuple[HashStore, RosterLog]:
    """A store with a log of a, which has left, and b; and a copy of that log."""
    store = HashStore()
    log = RosterLog(store)
    assert log.join(member("a", 0))
    assert log.join(member("b", 1))
    log.leave(0)
    return store, log


def test_entries_are_learned_if_the_store_has_them(known):
    store, log = known
    other = RosterLog(store)
    other.catch_up()
    assert other.join(member("c", 2))
    log.learn(other.version)
    assert names(log) == ["b", "c"]
    log.learn(version_of(other.entries()[:2]))  # of a worker that knows less
    assert log.entries() == other.entries()
    assert log.version == version_of(other.entries())


@pytest.mark.parametrize(
    "forged",
    [
        joining("b", 7),  # a name of another worker, at an address of the forger's
        joining("z", 7),
        json.dumps({"leave": 1}),
        "{",
        "",
    ],
)
def test_entries_that_the_store_does_not_have_are_refused(known, forged):
    _, log = known
    before = log.entries(), log.members()
    with pytest.raises(RosterError, match="entry 3 of its roster is not in the store"):
        log.learn(version_of([*log.entries(), forged]))
    with pytest.raises(RosterError, match="contradicts what is known here"):
        log.learn(version_of([joining("a", 0), forged]))
    assert (log.entries(), log.members()) == before


@pytest.mark.parametrize("digest", [b"", bytes(32), bytes(33)])
def test_who_knows_other_entries_than_the_store_is_refused(known, digest):
    """What the store has is learned."""
    store, log = known
    other = RosterLog(store)
    other.catch_up()
    assert other.join(member("c", 2))
    with pytest.raises(RosterError, match="contradicts what is known here"):
        log.learn(RosterVersion(4, digest))
    assert log.entries() == other.entries()
    with pytest.raises(RosterError, match="entry 4 of its roster is not in the store"):
        log.learn(RosterVersion(2**64 - 1, digest))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        "{}",
        '"join"',
        "[" * 100_000,
        '{"leave": 0}',
        '{"leave": true}',
        '{"leave": [1]}',
        '{"leave": 9}',
        '{"leave": 1, "join": {}}',
        '{"join": 3}',
        '{"join": {}}',
        '{"join": {"info": 3, "address": "127.0.0.1:1"}}',
        '{"join": {"info": {"name": "c"}, "address": "127.0.0.1:1"}}',
        '{"join": {"info": {"name": "c", "id": "2"}, "address": "127.0.0.1:1"}}',
        '{"join": {"info": {"name": "c", "id": -1}, "address": "127.0.0.1:1"}}',
        '{"join": {"info": {"name": "c d", "id": 2}, "address": "127.0.0.1:1"}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": 3}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": "a\\nb:1"}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": "127.0.0.1:1", "device_maps": {"a": 3}}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": "127.0.0.1:1", "device_maps": {"a": {"cpu": 3}}}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": "127.0.0.1:1", "directory": ["d"]}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": "127.0.0.1:1", "process": "\\ud800"}}',
        '{"join": {"info": {"name": "c", "id": 2}, "address": "127.0.0.1:1", "else": 3}}',
        json.dumps({"join": {"info": {"name": "c" * 60_000, "id": 2}, "address": "127.0.0.1:1"}}),
        json.dumps({"join": asdict(member("c", 2)) | {"process": "x" * 100_000}}),
        joining("c", 0),
        joining("c", 1),
        joining("b", 2),
    ],
)
def test_what_is_no_entry_is_refused_wherever_it_comes_from(known, text):
    store, log = known
    store.set("rpc/dynamic/3", text)
    before = log.entries(), log.members()
    with pytest.raises(RosterError, match="entry 3 of the roster is refused") as caught:
        log.catch_up()
    assert len(str(caught.value)) < 500  # others are told
    with pytest.raises(RosterError, match="entry 3 of the roster is refused"):
        log.learn(version_of([*log.entries(), text]))
    with pytest.raises(RendezvousError, match="entry 3 of the roster is refused"):
        log.join(member("d", 5))
    assert (log.entries(), log.members()) == before


def test_nothing_is_learned_without_the_store(known):
    store, log = known
    version = version_of([*log.entries(), joining("c", 2)])

    def fail(_keys):
        raise ConnectionError("it has gone")

    store.check = fail
    with pytest.raises(RosterError, match="the store cannot tell entry 3 of its roster: it has gone"):
        log.learn(version)
