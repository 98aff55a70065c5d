"""Workers that do not come back are evicted, and learn it when they do."""

import os

import pytest
from gradwire import rpc
from gradwire.c10d import HashStore, TCPStore
from gradwire.errors import EvictedError, RendezvousError, RpcError, StoreNetworkError, WorkerLostError
from gradwire.rpc.contracts.worker import Member, WorkerInfo
from gradwire.rpc.membership.roster import RosterLog

from tests.remote_functions import add, wait_until
from tests.stopped import stopped
from tests.workers import Worker, Workers

LIVENESS = rpc.Liveness(heartbeat=0.1, suspect_after=2.0, lease=2.0)
"""Not shorter: a busy machine may keep a worker that lives from sending anything for a second or two."""
PATIENT = rpc.Liveness(heartbeat=0.1, suspect_after=2.0, lease=1000.0)


def call_until(error: type[Exception], name: str) -> str:
    raised: list[Exception] = []

    def fails() -> bool:
        try:
            rpc.rpc_sync(name, add, (1, 2))
        except error as found:
            raised.append(found)
        except RpcError:
            pass
        return bool(raised)

    wait_until(fails)
    return str(raised[0])


def join(rank: int, port: int, liveness: rpc.Liveness = LIVENESS) -> None:
    options = rpc.RpcBackendOptions(init_timeout=50, liveness=liveness)
    store = TCPStore("127.0.0.1", port)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options, store=store)


def test_a_stopped_worker_is_evicted_and_told_so_and_can_be_replaced(workers):
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        group = list(workers(3))
        for each in [worker.start(join, rank, store.port) for rank, worker in enumerate(group)]:
            each.result()
        group[0].run(rpc.rpc_sync, "w1", add, (1, 2))
        old = group[1]
        with stopped(old):
            assert "did not come back" in group[0].run(call_until, WorkerLostError, "w1")
            (group[1],) = workers(1)
            group[1].run(join, 1, store.port)
            for worker in (group[0], group[2]):
                assert worker.run(rpc.rpc_sync, "w1", os.getpid) == group[1].pid
        assert "'w1', was evicted from its group: it did not come back" in old.run(call_until, EvictedError, "w0")
        assert "was evicted" in old.run(call_until, EvictedError, "w2")
        old.run(rpc.shutdown, graceful=False)
        for each in [worker.start(rpc.shutdown) for worker in group]:
            each.result()


def connected(workers: Workers, port: int) -> list[Worker]:
    """Starts three workers that have called each other; only the lease of the first one ends."""
    group = list(workers(3))
    leases = (LIVENESS, PATIENT, PATIENT)
    for each in [worker.start(join, rank, port, leases[rank]) for rank, worker in enumerate(group)]:
        each.result()
    for worker in (group[0], group[2]):
        worker.run(rpc.rpc_sync, "w1", add, (1, 2))
    group[0].run(rpc.rpc_sync, "w2", add, (1, 2))
    return group


def test_the_others_are_told_of_an_eviction(workers):
    """They went on until their own leases were over."""
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        group = connected(workers, store.port)
        with stopped(group[1]):
            expected = "it was evicted: it did not come back within 2 s"
            assert expected in group[2].run(call_until, WorkerLostError, "w1")
        assert "it did not come back within 2 s" in group[1].run(call_until, EvictedError, "w2")
        for worker in group:
            worker.run(rpc.shutdown, graceful=False)


asked: list[int] = []
check = TCPStore.check


def take_store_away() -> None:
    def fail(_store: TCPStore, _keys: list[str]) -> bool:
        asked.append(1)
        raise StoreNetworkError("the store is gone")

    TCPStore.check = fail  # type: ignore[method-assign]


def give_store_back() -> None:
    wait_until(lambda: len(asked) > 1)
    TCPStore.check = check  # type: ignore[method-assign]


def test_an_eviction_is_tried_again_until_the_store_answers(workers):
    """It was given up."""
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        group = connected(workers, store.port)
        group[0].run(take_store_away)
        with stopped(group[1]):
            assert "did not come back" in group[0].run(call_until, WorkerLostError, "w1")
            group[0].run(give_store_back)
            assert "it was evicted" in group[2].run(call_until, WorkerLostError, "w1")
        for worker in group:
            worker.run(rpc.shutdown, graceful=False)


def test_of_two_evictions_one_counts():
    store = HashStore()
    logs = [RosterLog(store, "group") for _ in range(3)]
    for log in logs:
        log.begin([Member(WorkerInfo(f"w{rank}", rank), f"127.0.0.1:{rank + 1}", 0) for rank in range(3)])
    assert logs[0].evict(1, "it was silent", 0)
    assert not logs[2].evict(1, "it was slow", 2)
    again = logs[2].choose("w1", 1)
    logs[2].catch_up()
    again = logs[2].choose("w1", 1)
    assert again == WorkerInfo("w1", 1, 3)
    assert logs[2].join(Member(again, "127.0.0.1:9", 0))
    assert not logs[0].evict(1, "it was silent", 0)
    assert logs[0].find("w1") is None
    logs[0].catch_up()
    assert logs[0].find("w1").info == again
    gone = logs[0].departed()[1]
    assert (gone.evicted, gone.successor, gone.why) == (True, 3, "it was evicted: it was silent")


def test_of_two_workers_that_evict_each_other_one_stays():
    store = HashStore()
    logs = [RosterLog(store, "group") for _ in range(3)]
    for log in logs:
        log.begin([Member(WorkerInfo(f"w{rank}", rank), f"127.0.0.1:{rank + 1}", 0) for rank in range(3)])
        log.catch_up()
    assert logs[0].evict(1, "it was silent", 0)
    assert not logs[1].evict(0, "it was silent", 1)  # it learns of its own eviction when it writes
    logs[2].catch_up()
    for log in logs[1:]:
        assert [member.info.name for member in log.members()] == ["w0", "w2"]


@pytest.mark.parametrize("bad", [WorkerInfo("w1", 1, 1), WorkerInfo("w2", 1, 3), WorkerInfo("w3", 3, 3)])
def test_who_joins_a_static_group_is_a_new_incarnation_of_a_member(bad):
    log = RosterLog(HashStore(), "group")
    log.begin([Member(WorkerInfo(f"w{rank}", rank), f"127.0.0.1:{rank + 1}", 0) for rank in range(3)])
    with pytest.raises(RendezvousError, match="entry 0 of the roster is refused"):
        log.join(Member(bad, "127.0.0.1:9", 0))
