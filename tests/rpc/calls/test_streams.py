"""Streams: generators on other workers, and their items."""

import asyncio
import concurrent.futures
import ctypes
import itertools
import random
import threading

import psutil
import pytest
import torch
from gradwire import autograd, rpc

from tests.remote_functions import assert_clean, set_event, wait_until
from tests.rpc.calls.generators import (
    all_kinds,
    count_slowly,
    count_to,
    fail_after,
    large_items,
    random_items,
    relay,
    scaled,
    squares,
    times_advanced,
    wait_for_event,
    waits_between,
    watched,
)

MIB = 1 << 20


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_items_come_in_order(workers, to):
    a, b = workers.rpc(2)

    def check() -> None:
        assert list(rpc.rpc_stream(to, count_to, (5000,))) == list(range(5000))
        assert list(rpc.rpc_stream(to, count_to, kwargs={"stop": 50}, window_items=1)) == list(range(50))
        assert list(rpc.rpc_stream(to, count_to, (0,))) == []
        assert list(rpc.rpc_stream(to, squares, (5,))) == [0, 1, 4, 9, 16]
        stream = rpc.rpc_stream(to, count_to, (2,))
        assert [next(stream), next(stream), next(stream, None), next(stream, None)] == [0, 1, None, None]
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_items_may_be_whatever_a_result_may_be(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        items = list(rpc.rpc_stream("worker1", all_kinds, window=1000))
        assert len(items) == 12
        for i, size in enumerate((0, 1, 1000, 100_000, 3_000_000)):
            assert torch.equal(items[2 * i], torch.full((size,), float(size)))
            assert torch.equal(items[2 * i + 1]["pair"][1], torch.arange(size))
        assert items[10].owner_name() == "worker1"
        assert items[10].to_here() == "kept at the producer"
        del items
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_streams_of_streams(workers):
    a, _ = workers.rpc(2)
    assert a.run(lambda: list(rpc.rpc_stream("worker1", relay, (100,)))) == list(range(1, 101))


def test_asyncio_on_both_sides(workers):
    a, b = workers.rpc(2)

    async def check() -> None:
        async with rpc.rpc_stream("worker1", count_slowly, (100,), window_items=7) as stream:
            assert [item async for item in stream] == list(range(100))
        slow = [rpc.rpc_stream("worker1", count_slowly, (20,), window_items=2) for _ in range(10)]

        async def total(stream: rpc.RpcStream) -> int:
            return sum([item async for item in stream])

        assert await asyncio.gather(*map(total, slow)) == [190] * 10
        unfinished = rpc.rpc_stream("worker1", waits_between, ("later",))
        assert await anext(unfinished) == "first"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(unfinished), 0.01)
        await rpc.aio.call("worker1", set_event, ("later",))
        assert await anext(unfinished) == "later"
        with pytest.raises(StopAsyncIteration):
            await anext(unfinished)
        with pytest.raises(LookupError, match="no more of these"):
            await total(rpc.rpc_stream("worker1", fail_after, (2,)))
        abandoned = rpc.rpc_stream("worker1", count_slowly, (1000, "abandoned"), window_items=2)
        assert await anext(abandoned) == 0
        await abandoned.aclose()
        assert await rpc.aio.call("worker1", wait_for_event, ("abandoned",))

    a.run(lambda: asyncio.run(check()))
    a.run(assert_clean)
    b.run(assert_clean)


def test_the_generator_pauses_when_the_window_is_full(workers):
    a, _ = workers.rpc(2)

    def produced() -> int:
        return rpc.rpc_sync("worker1", times_advanced)

    def check_items() -> None:
        with rpc.rpc_stream("worker1", watched, ("items",), window_items=4) as stream:
            wait_until(lambda: produced() == 4)
            for taken in range(1, 20):
                next(stream)
                wait_until(lambda n=taken: produced() == n + 4)
        assert rpc.rpc_sync("worker1", wait_for_event, ("items",))
        assert produced() == 23

    def check_bytes() -> None:
        before = produced()
        with rpc.rpc_stream("worker1", watched, ("bytes", 100, 300_000), window=MIB) as stream:
            wait_until(lambda: produced() == before + 4)
            wait_until(lambda: rpc.debug_info()["stream_bytes_received"] >= 1_200_000)
            assert rpc.rpc_sync("worker1", rpc.debug_info)["stream_bytes_sent"] < MIB + 301_000
            assert sum(1 for _ in stream) == 100

    a.run(check_items)
    a.run(check_bytes)
    a.run(assert_clean)


def test_paused_streams_hold_no_thread(workers):
    a, _ = workers.rpc(2, num_worker_threads=4)

    def check() -> None:
        streams = [rpc.rpc_stream("worker1", count_to, (20,), window_items=2) for _ in range(200)]
        assert [next(stream) for stream in streams] == [0] * 200
        info = rpc.rpc_sync("worker1", rpc.debug_info)
        assert info["num_produced_streams"] == 200
        assert info["executor_threads"] < 50
        assert rpc.debug_info()["num_consumed_streams"] == 200
        assert [sum(stream) for stream in streams] == [190] * 200

    a.run(check)
    a.run(assert_clean)


def test_many_streams_at_once(workers):
    """Sizes around the limits of channels and windows, some left halfway; by threads that take turns."""
    channels = rpc.ChannelOptions(inline_threshold=1000, max_inline_bytes=3000, chunk_bytes=2500)
    a, b = workers.rpc(2, channels=channels, num_worker_threads=4)

    def consume(seed: int) -> None:
        chance = random.Random(seed)
        count, stop = chance.randrange(40), chance.randrange(60)
        window, window_items = chance.choice([1, 3000, MIB]), chance.choice([1, 5, 1000])
        stream = rpc.rpc_stream(
            f"worker{seed % 3 // 2}", random_items, (seed, count), window=window, window_items=window_items
        )
        taken = list(itertools.islice(stream, stop))
        for item, expected in itertools.zip_longest(taken, itertools.islice(random_items(seed, count), stop)):
            assert torch.equal(item[1], expected[1])
            assert item[0] == expected[0]

    def check() -> None:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(consume, range(120)))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_shutdown_waits_for_open_streams(workers):
    a, b = workers.rpc(2)

    def consume_all() -> int:
        stream = rpc.rpc_stream("worker1", count_to, (1000,), window_items=2)
        total = [0]
        reader = threading.Thread(target=lambda: total.append(sum(stream)))
        reader.start()
        rpc.shutdown()
        reader.join()
        return total[-1]

    leaving = b.start(rpc.shutdown)
    assert a.run(consume_all) == 499500
    leaving.result()


def test_items_are_differentiable(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        weight = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            total = torch.zeros(())
            for item in rpc.rpc_stream("worker1", scaled, (weight, 5), window_items=2):
                total = total + (item * item).sum()
            autograd.backward(context_id, [total])
            gradient = autograd.get_gradients(context_id)[weight]
        assert torch.allclose(gradient, torch.full((3,), 2.0 * sum(i * i for i in range(1, 6))))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def return_freed_memory() -> None:
    """Has the C library return large blocks to the system when they are freed, so that only live memory counts."""
    mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 256 * 1024) == 1


@pytest.mark.parametrize("nbytes", [MIB, 16 * MIB])
def test_a_slow_consumer_bounds_the_memory_of_both(workers, nbytes):
    total, window = 192 * MIB, 16 * MIB
    a, b = workers.rpc(2)
    workers.each([a, b], return_freed_memory)

    def check() -> None:
        process = psutil.Process()
        for _ in rpc.rpc_stream("worker1", large_items, (4 * nbytes, nbytes)):
            pass  # what connections and allocators take once
        mine, theirs, here, there = [], [], [], []
        stream = rpc.rpc_stream("worker1", large_items, (total, nbytes), window=window)
        for i, item in enumerate(stream):
            # Slow: it takes the next only when the window is full, but for credit not yet told, or all is there.
            wait_until(
                lambda: (
                    rpc.debug_info()["stream_bytes_received"] >= window // 2
                    or not rpc.debug_info()["agent.client_active_calls"]
                )
            )
            assert int(item["tensor"][-1]) == i % 251
            assert item["tensor"].numel() == nbytes
            mine.append(rpc.debug_info()["stream_bytes_received"])
            theirs.append(item["buffered"])
            here.append(process.memory_info().rss)
            there.append(item["rss"])
        assert len(mine) == total // nbytes
        assert max(theirs) < window  # it is advanced only below the window
        assert max(mine) < window + nbytes + 64 * 1024
        assert max(here) - here[0] < 64 * MIB
        assert max(there) - there[0] < 64 * MIB
        assert_clean()

    a.run(check)
