"""Stores that several processes use."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d import HashStore, Store
from gradwire.errors import StoreTimeoutError

from tests.c10d.stores import kinds as stores
from tests.c10d.stores.kinds import SHARED_STORES, call

shared_stores = pytest.mark.parametrize("opened", SHARED_STORES, indirect=True)

ROUNDS = int(os.environ.get("GRADWIRE_STORE_ROUNDS", "30"))
"""Rounds of five operations each on each worker; `make stores` runs more."""

WORKERS = int(os.environ.get("GRADWIRE_STORE_WORKERS", "4"))


@shared_stores
def test_get_waits_for_a_set_in_another_process(opened, store_workers):
    reader, writer = store_workers(2)
    pending = reader.start(call, "get", "key")
    assert not pending.done()
    writer.run(call, "set", "key", "value")
    assert pending.result() == b"value"
    assert opened.store.get("key") == b"value"


@shared_stores
def test_pop_waits_for_a_push_in_another_process(opened, store_workers):
    taker, giver = store_workers(2)
    pending = taker.start(call, "queue_pop", "q")
    assert not pending.done()
    giver.run(call, "queue_push", "q", b"\x00item")
    assert pending.result() == b"\x00item"


@shared_stores
def test_a_timeout_is_raised_to_another_process(opened, store_workers):
    (reader,) = store_workers(1)
    with pytest.raises(StoreTimeoutError, match="'a', 'b'") as caught:
        reader.run(call, "wait", ["a", "b"], 0.01)
    assert caught.value.missing == ["a", "b"]


def run_mixed_operations(me: int, store: Store | None = None) -> tuple[list[bytes], list[bytes]]:
    """Runs operations that compete with other workers'. Returns the popped items, and the winner of each slot."""
    mine = store or stores.mine
    order = random.Random(me)
    popped, winners = [], []
    for round_number in range(ROUNDS):
        steps = [
            lambda: mine.add("count", me + 1),
            lambda: mine.append("log", f"{me} "),
            lambda n=round_number: mine.queue_push("queue", f"{me}.{n}"),
        ]
        order.shuffle(steps)
        for step in steps:
            step()
        winners.append(mine.compare_set(f"slot{round_number}", "", str(me)))
        popped.append(mine.queue_pop("queue"))
    return popped, winners


def check_results(store: Store, results: list[tuple[list[bytes], list[bytes]]]) -> None:
    assert store.get("count") == str(ROUNDS * sum(range(1, WORKERS + 1))).encode()
    assert Counter(store.get("log").decode().split()) == {str(me): ROUNDS for me in range(WORKERS)}
    popped = [item for items, _ in results for item in items]
    assert sorted(popped) == sorted(f"{me}.{n}".encode() for me in range(WORKERS) for n in range(ROUNDS))
    assert store.queue_len("queue") == 0
    for _, winners in results:
        assert winners == results[0][1]
    assert store.multi_get([f"slot{n}" for n in range(ROUNDS)]) == results[0][1]


@pytest.mark.timeout(max(120, ROUNDS))
@shared_stores
def test_operations_are_atomic(opened, store_workers, workers):
    pending = [worker.start(run_mixed_operations, me) for me, worker in enumerate(store_workers(WORKERS))]
    check_results(opened.store, [p.result(max(60, ROUNDS)) for p in pending])


def test_operations_on_a_hash_store_are_atomic_among_threads():
    store = HashStore()
    with ThreadPoolExecutor(WORKERS) as pool:
        check_results(store, list(pool.map(run_mixed_operations, range(WORKERS), [store] * WORKERS)))


def all_reduce_with_gloo(store: Store, rank: int, size: int) -> list[float]:
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    tensor = torch.tensor([float(rank + 1)])
    group.allreduce([tensor]).wait()
    return tensor.tolist()


@shared_stores
def test_gloo_runs_on_the_store(opened, store_workers):
    a, b = store_workers(2)
    pending = [w.start(lambda r: all_reduce_with_gloo(stores.mine, r, 2), rank) for rank, w in enumerate((a, b))]
    assert [p.result() for p in pending] == [[3.0], [3.0]]


def test_gloo_runs_on_a_hash_store(workers):
    (a,) = workers(1)

    def both_ranks() -> list[list[float]]:
        with HashStore() as store, ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: all_reduce_with_gloo(store, rank, 2), range(2)))

    assert a.run(both_ranks) == [[3.0], [3.0]]


def all_reduce_with_torch(rank: int, size: int) -> list[list[float]]:
    """Calls torch.distributed's functions, also in a group made after Python has dropped the store."""
    dist.init_process_group("gloo", store=stores.mine, rank=rank, world_size=size)
    del stores.mine
    results = []
    for group in (None, dist.new_group(list(range(size)))):
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor, group=group)
        results.append(tensor.tolist())
    dist.barrier()
    dist.destroy_process_group()
    return results


@shared_stores
def test_torch_distributed_runs_on_the_store(opened, store_workers):
    started = store_workers(2)
    pending = [w.start(all_reduce_with_torch, rank, 2) for rank, w in enumerate(started)]
    assert [p.result() for p in pending] == [[[3.0], [3.0]]] * 2
