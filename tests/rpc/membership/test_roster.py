"""The log of joins and leaves of a dynamic group."""

import json
import tracemalloc
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import reduce

import pytest
from gradwire.c10d import HashStore
from gradwire.errors import RendezvousError
from gradwire.proto.v1.store_pb2 import Operation, Outcome
from gradwire.rpc.contracts.worker import Member, RosterVersion, WorkerInfo
from gradwire.rpc.membership.roster import Roster, RosterError, RosterLog
from hypothesis import given
from hypothesis import strategies as st


def member(name: str, identifier: int) -> Member:
    return Member(WorkerInfo(name, identifier), f"127.0.0.1:{1000 + identifier}", 0)


def entries(store: HashStore) -> list[str]:
    """Returns all entries of the log in a store."""
    keys = [key for key in store.list_keys() if key.startswith("rpc/dynamic/") and key[-1].isdecimal()]
    return [store.get(f"rpc/dynamic/{position}").decode() for position in range(len(keys))]


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
    assert logs[0].version == logs[1].version == logs[2].version
    assert logs[0].members() == logs[1].members() == logs[2].members()
    assert len(set(names(logs[0]))) == len(logs[0].members())


class CountingStore(HashStore):
    """Counts the operations on a store."""

    operations = 0

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        self.operations += 1
        return super()._execute(operation, seconds)


def churn(log: RosterLog, count: int) -> None:
    """Has so many workers join and leave, one after the other."""
    for number in range(count):
        info = log.choose(f"guest{number % 3}", -1)
        assert log.join(Member(info, "127.0.0.1:1", 0))
        log.leave(info.wire_id)


def test_joining_costs_what_the_present_members_cost():
    """However many have joined and left before."""
    costs = []
    for count in (20, 300):
        store = CountingStore()
        log = RosterLog(store)
        for number in range(20):
            assert log.join(member(f"stays{number}", number))
        churn(log, count)
        assert store.operations / (20 + 2 * count) < 1.1  # a snapshot now and then
        store.operations = 0
        newcomer = RosterLog(store)
        newcomer.catch_up()
        costs.append(store.operations)
        assert newcomer.version == log.version == version_of(entries(store))
        assert newcomer.members() == log.members()
        # Who has left before is not accepted again.
        assert newcomer.choose("new", -1).id == 20 + count
        with pytest.raises(RendezvousError, match="rank 21 is taken"):
            newcomer.choose("new", 21)
        store.set(f"rpc/dynamic/{newcomer.version.length}", joining("again", 21))
        with pytest.raises(RosterError, match="the id of .* belongs to another worker"):
            newcomer.catch_up()
    assert max(costs) <= 16


def test_who_was_away_for_long_reads_on():
    store = HashStore()
    away, log = RosterLog(store), RosterLog(store)
    assert away.join(member("a", 0))
    log.catch_up()
    churn(log, 500)
    assert not away.join(member("b", 1))  # whose position has been taken
    away.catch_up()
    assert away.version == log.version
    assert names(away) == ["a"]
    with pytest.raises(RosterError, match="is 1000 entries older than what is known here"):
        log.learn(version_of(entries(store)[:1]))


def test_a_static_group_is_restored_from_a_snapshot():
    first = [member(f"worker{rank}", rank) for rank in range(3)]
    store = HashStore()
    log = RosterLog(store, "group")
    log.begin(first)
    for number in range(20):
        rank = number % 2
        info = log.choose(f"worker{rank}", rank)
        assert log.join(Member(info, "127.0.0.1:1", 0))
    assert log.evict(2, "it did not answer", log.find("worker0").info.wire_id)
    other = RosterLog(store, "group")
    other.begin(first)
    other.catch_up()
    assert (other.version, other.members(), other.departed()) == (log.version, log.members(), log.departed())
    assert other.choose("worker2", 2) == log.choose("worker2", 2) == WorkerInfo("worker2", 2, 23)


@pytest.mark.parametrize(
    "change",
    [
        "{",
        [],
        {"length": 0},
        {"length": "16"},
        {"length": 18},
        {"length": 2**40},
        {"digest": "xyz"},
        {"roster": []},
        {"roster": {"epoch": -1}},
        {"roster": {"members": [{"info": 3}]}},
        {"roster": {"members": [asdict(member("a", 0)), asdict(member("a", 50))]}},
        {"roster": {"members": [asdict(member("a", 0)), asdict(member("b", 3))]}},
        {"roster": {"retired": [[0, 2**31]]}},
        {"roster": {"retired": [[1, 17]]}},
        {"roster": {"retired": [[1, 10], [20, 30]]}},
        {"roster": {"retired": [[0, 0]]}},
        {"roster": {"retired": [[3, "4"]]}},
        {"roster": {"departed": [{"member": 3}]}},
    ],
)
def test_what_is_no_snapshot_is_refused(change):
    store = HashStore()
    log = RosterLog(store)
    assert log.join(member("a", 0))
    churn(log, 8)
    if isinstance(change, dict):
        snapshot = json.loads(store.get("rpc/dynamic/snapshot"))
        roster = change.get("roster")
        change = snapshot | change | ({"roster": snapshot["roster"] | roster} if isinstance(roster, dict) else {})
    store.set("rpc/dynamic/snapshot", change if isinstance(change, str) else json.dumps(change))
    newcomer = RosterLog(store)
    with pytest.raises(RosterError, match="the snapshot of the roster is refused") as caught:
        newcomer.catch_up()
    assert len(str(caught.value)) < 600
    assert newcomer.members() == []


@pytest.mark.parametrize("retired", [[[0, 2**31 - 1]], [[0, 2**20], [2**21, 2**30]]])
def test_no_memory_is_allocated_for_more_ids_than_can_have_left(retired):
    """A few characters of the store had each worker that joins allocate as many ids as there are."""
    record = {"epoch": 0, "members": [], "retired": retired, "departed": []}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than .* workers have left"):
            Roster().restore(record, 2**40)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


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
    log.learn(version_of(entries(store)[:2]))  # of a worker that knows less
    assert log.version == other.version == version_of(entries(store))


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
    store, log = known
    before = log.version, log.members()
    with pytest.raises(RosterError, match="entry 3 of its roster is not in the store"):
        log.learn(version_of([*entries(store), forged]))
    with pytest.raises(RosterError, match="contradicts what is known here"):
        log.learn(version_of([joining("a", 0), forged]))
    assert (log.version, log.members()) == before


@pytest.mark.parametrize("digest", [b"", bytes(32), bytes(33)])
def test_who_knows_other_entries_than_the_store_is_refused(known, digest):
    """What the store has is learned."""
    store, log = known
    other = RosterLog(store)
    other.catch_up()
    assert other.join(member("c", 2))
    with pytest.raises(RosterError, match="contradicts what is known here"):
        log.learn(RosterVersion(4, digest))
    assert log.version == other.version
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
    before = log.version, log.members()
    with pytest.raises(RosterError, match="entry 3 of the roster is refused") as caught:
        log.catch_up()
    assert len(str(caught.value)) < 500  # others are told
    with pytest.raises(RosterError, match="entry 3 of the roster is refused"):
        log.learn(version_of(entries(store)))
    with pytest.raises(RendezvousError, match="entry 3 of the roster is refused"):
        log.join(member("d", 5))
    assert (log.version, log.members()) == before


def test_nothing_is_learned_without_the_store(known):
    store, log = known
    version = version_of([*entries(store), joining("c", 2)])

    def fail(_keys):
        raise ConnectionError("it has gone")

    store.check = fail
    with pytest.raises(RosterError, match="the store cannot tell entry 3 of its roster: it has gone"):
        log.learn(version)


@pytest.mark.parametrize(
    ("joining", "error"),
    [
        (
            replace(
                member("b", 1),
                device_maps={f"w{i}": {f"cuda:{j}": "cuda:0" for j in range(9)} for i in range(9000)},
            ),
            "characters, of .* at most: give fewer device maps",
        ),
        (replace(member("b", 1), address=""), "'b' .*cannot join: it describes no worker"),
        (Member(WorkerInfo("b", 1 << 31), "127.0.0.1:1", 0), "cannot join"),
    ],
    ids=["device maps", "address", "id"],
)
def test_a_join_that_others_would_refuse_is_not_stored(joining, error):
    store = HashStore()
    log = RosterLog(store)
    assert log.join(member("a", 0))
    with pytest.raises(RosterError, match=error):
        log.join(joining)
    assert log.join(member("c", 2))
    other = RosterLog(store)
    other.catch_up()
    assert names(other) == ["a", "c"]


def test_ranks_that_nobody_can_have_are_refused():
    with pytest.raises(RendezvousError, match=f"rank {1 << 31} is too large: the largest is {(1 << 31) - 1}"):
        RosterLog(HashStore()).choose("a", 1 << 31)


@pytest.mark.parametrize(
    "change",
    [
        {"members": [asdict(Member(WorkerInfo("a", 0, 1), "127.0.0.1:1", 0))]},  # the wire id of another rank
        {"departed": [{"member": asdict(member("b", 1)), "reason": 5, "evicted": False, "successor": -1}]},
        {"departed": [{"member": asdict(member("x", 9)), "reason": "", "evicted": False, "successor": -1}]},
    ],
    ids=["member", "reason", "stranger"],
)
def test_snapshots_that_contradict_the_group_are_refused(change):
    roster = Roster([member("a", 0), member("b", 1)])
    record = {"epoch": 0, "members": [asdict(member("a", 0))], "retired": [[1, 1], [9, 9]], "departed": []}
    with pytest.raises((RosterError, ValueError)):
        roster.restore({**record, **change}, 10)
    roster.restore(record, 10)
    assert roster.find("b") is None
    assert roster.choose("b", 1) == WorkerInfo("b", 1, 10)


def test_a_roster_of_nobody_has_a_next_id():
    roster = Roster([member("a", 0)])
    roster.restore({"epoch": 0, "members": [], "retired": [], "departed": []}, 1)
    assert roster.choose("a", 0) == WorkerInfo("a", 0, 1)
