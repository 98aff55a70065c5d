"""Groups of many workers, and the resources that they release."""

import threading

import psutil
import torch
from gradwire import rpc

from tests.remote_functions import add, assert_clean, counts, identity, multiply


def call_everybody() -> int:
    """Calls all workers at once; returns the number of threads meanwhile."""
    me = rpc.get_worker_info().id
    futures = [rpc.rpc_async(other, add, (me, other)) for other in range(32) if other != me]
    assert [future.wait() for future in futures] == [me + other for other in range(32) if other != me]
    return threading.active_count()


def os_threads() -> int:
    return psutil.Process().num_threads()


def test_32_workers_all_to_all(workers):
    started = workers.rpc(32)
    workers.each(started, call_everybody)
    threads = workers.each(started, os_threads)
    print(f"threads of 32 connected workers: {min(threads)} to {max(threads)}")
    assert max(threads) <= 40
    workers.each(started, rpc.shutdown)


def test_nothing_is_left_after_many_calls(workers):
    a, b = workers.rpc(2)

    def calls(count: int) -> None:
        for start in range(0, count, 500):
            futures = [rpc.rpc_async("worker1", identity, (torch.ones(4) * i,)) for i in range(start, start + 500)]
            for i, future in enumerate(futures):
                assert future.wait()[0] == start + i

    def references(count: int) -> None:
        for i in range(count):
            rref = rpc.remote("worker1", add, (i, 1))
            if i % 4 == 0:
                assert rref.to_here() == i + 1
            if i % 4 == 1:
                assert rpc.rpc_sync("worker1", to_here, (rref,)) == i + 1

    def failures(count: int) -> None:
        for _ in range(count):
            try:
                rpc.remote("worker1", add, (1, "x")).to_here()
            except TypeError:
                continue
            raise AssertionError("it did not raise")

    def memory() -> int:
        return psutil.Process().memory_info().rss

    for function, count in ((calls, 1_000), (references, 100), (failures, 25)):
        a.run(function, count)
    before = workers.each([a, b], memory)
    for function, count in ((calls, 4_000), (references, 400), (failures, 100)):
        a.run(function, count)
    workers.each([a, b], assert_clean)
    assert not any(a.run(counts).values())
    grown = [(after - first) / 2**20 for after, first in zip(workers.each([a, b], memory), before, strict=True)]
    print(f"memory grew by {grown[0]:.1f} and {grown[1]:.1f} MiB")
    assert max(grown) < 5, "so many MiB"


def to_here(rref: rpc.RRef) -> object:
    return rref.to_here()


def test_shutdown_ends_all_threads_and_closes_all_sockets(workers):
    a, b = workers.rpc(2)
    a.run(rpc.rpc_sync, "worker1", multiply, (torch.ones(2), torch.ones(2)))
    workers.each([a, b], rpc.shutdown)

    def leftovers() -> tuple[list[str], list[str]]:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire")]
        own = {str(c.laddr) for c in psutil.Process().net_connections("unix") if c.laddr}  # that are bound
        tcp = [str(c.laddr) for c in psutil.Process().net_connections("inet")]
        return names, [*tcp, *own]

    assert workers.each([a, b], leftovers) == [([], [])] * 2
