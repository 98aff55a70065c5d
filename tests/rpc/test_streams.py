"""Generators on other workers, and the streams of their items."""

import asyncio
import concurrent.futures
import ctypes
import gc
import itertools
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import RemoteError, RpcTimeoutError, SerializationError, WorkerLostError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.messages import MessageType, Request

from tests import remote_functions
from tests.remote_functions import add, assert_clean, event, identity, set_event, wait_for, wait_until

MIB = 1 << 20

advanced = 0
"""How often this worker's generators have been advanced."""


def count_to(stop: int) -> Iterator[int]:
    yield from range(stop)


def all_kinds() -> Iterator[Any]:
    for size in (0, 1, 1000, 100_000, 3_000_000):
        yield torch.full((size,), float(size))
        yield {"size": size, "pair": [torch.arange(3), torch.arange(size)]}
    yield rpc.RRef("kept at the producer")
    yield None


def fail_after(items: int) -> Iterator[int]:
    yield from range(items)
    raise LookupError("no more of these")


def watched(name: str, items: int = 1 << 30, nbytes: int = 8) -> Iterator[torch.Tensor]:
    """Says when it is closed."""
    global advanced
    try:
        for _ in range(items):
            advanced += 1
            yield torch.zeros(nbytes, dtype=torch.uint8)
    finally:
        event(name).set()


def how_often_advanced() -> int:
    return advanced


def waits(name: str) -> Iterator[str]:
    yield wait_for(name)


def waits_between(name: str) -> Iterator[str]:
    yield "first"
    yield wait_for(name)


def wait_for_event(name: str) -> bool:
    return event(name).wait(20)


class Untransportable:
    """Pickles, but cannot be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return complain, ()


def complain() -> None:
    raise ValueError("cannot be made again")


def yields_what_cannot_be_read() -> Iterator[Any]:
    yield 1
    yield Untransportable()
    yield 3


def yields_what_does_not_pickle() -> Iterator[Any]:
    yield 1
    yield {"lock": threading.Lock()}


async def count_slowly(stop: int, name: str = "closed") -> AsyncIterator[int]:
    try:
        for i in range(stop):
            await asyncio.sleep(0)
            yield await rpc.rpc_async(rpc.get_worker_info(), identity, (i,))
    finally:
        event(name).set()


def squares(n: int) -> Iterator[int]:
    return map(int.__mul__, range(n), range(n))


def scaled(weight: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for i in range(1, count + 1):
        yield weight * i


def relay(items: int) -> Iterator[int]:
    """A stream of a stream, back from the worker that asks."""
    with rpc.rpc_stream(1 - rpc.get_worker_info().id, count_to, (items,), window_items=3) as source:
        for item in source:
            yield item + 1


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


def test_items_are_whatever_a_result_can_be(workers):
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


def test_asyncio_at_both_ends(workers):
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


def test_an_error_comes_after_the_items_before_it(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        stream = rpc.rpc_stream("worker1", fail_after, (3,))
        assert [next(stream) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(LookupError, match="no more of these") as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert caught.value.__cause__.worker == "worker1"
        assert "in fail_after" in caught.value.__cause__.remote_traceback
        assert next(stream, "over") == "over"
        del caught
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_what_is_no_generator(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        with pytest.raises(
            TypeError, match="add returned 'int', which cannot be streamed: rpc_stream needs a gen"
        ):
            next(rpc.rpc_stream("worker1", add, (1, 2)))
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            next(rpc.rpc_stream("worker1", count_to))
        with pytest.raises(RuntimeError, match="the function to stream raised StopIteration"):
            next(rpc.rpc_stream("worker1", next, (iter(()),)))
        with pytest.raises(ValueError, match="window is 0"):
            rpc.rpc_stream("worker1", count_to, (1,), window=0)
        with pytest.raises(ValueError, match="window_items is 1.5"):
            rpc.rpc_stream("worker1", count_to, (1,), window_items=1.5)
        with pytest.raises(SerializationError, match="args"):
            rpc.rpc_stream("worker1", count_to, (threading.Lock(),))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_items_that_cannot_travel(workers):
    a, b = workers.rpc(2, channels=rpc.ChannelOptions(max_payload_bytes=MIB))

    def check() -> None:
        unreadable = rpc.rpc_stream("worker1", yields_what_cannot_be_read)
        assert next(unreadable) == 1
        with pytest.raises(ValueError, match="cannot be made again"):
            next(unreadable)
        assert next(unreadable, None) is None
        unsendable = rpc.rpc_stream("worker1", yields_what_does_not_pickle)
        assert next(unsendable) == 1
        with pytest.raises(SerializationError, match=r"the item\['lock'\] cannot be sent"):
            next(unsendable)
        with pytest.raises(ValueError, match="max_payload_bytes is 1048576"):
            next(rpc.rpc_stream("worker1", watched, ("refused", 2, 2 * MIB)))
        assert rpc.rpc_sync("worker1", wait_for_event, ("refused",))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_the_generator_pauses_when_the_window_is_full(workers):
    a, _ = workers.rpc(2)

    def produced() -> int:
        return rpc.rpc_sync("worker1", how_often_advanced)

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
        streams = [rpc.rpc_stream("worker1", count_to, (100,), window_items=2) for _ in range(200)]
        assert [next(stream) for stream in streams] == [0] * 200
        info = rpc.rpc_sync("worker1", rpc.debug_info)
        assert info["num_produced_streams"] == 200
        assert info["executor_threads"] < 50
        assert rpc.debug_info()["num_consumed_streams"] == 200
        assert [sum(stream) for stream in streams] == [4950] * 200

    a.run(check)
    a.run(assert_clean)


@pytest.mark.parametrize("how", ["close", "with", "break", "drop", "at once", "cycle"])
def test_closing_runs_finally_at_the_producer(workers, how):
    a, b = workers.rpc(2)

    def leave_cycle() -> None:
        cycle: list[Any] = [rpc.rpc_stream("worker1", watched, ("closed",))]
        cycle.append(cycle)
        next(cycle[0])

    def check() -> None:
        rpc.rpc_sync("worker1", identity, (1,))
        if how == "close":
            stream = rpc.rpc_stream("worker1", watched, ("closed",))
            next(stream)
            stream.close()
            stream.close()
            assert next(stream, None) is None
        elif how == "with":
            with pytest.raises(KeyError), rpc.rpc_stream("worker1", watched, ("closed",)) as stream:
                next(stream)
                raise KeyError
        elif how == "break":
            for _ in rpc.rpc_stream("worker1", watched, ("closed",)):
                break
        elif how == "drop":
            stream = rpc.rpc_stream("worker1", watched, ("closed",))
            next(stream)
            del stream
        elif how == "at once":
            for _ in range(100):
                rpc.rpc_stream("worker1", watched, ("closed",)).close()
            rpc.rpc_sync("worker1", set_event, ("closed",))  # perhaps none of them began
        else:
            leave_cycle()
            gc.collect()
        assert rpc.rpc_sync("worker1", wait_for_event, ("closed",))
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_references_in_items_that_nobody_took(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        with rpc.rpc_stream("worker1", references, (1000,), window_items=50) as stream:
            assert next(stream).to_here() == 0
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def references(count: int) -> Iterator[rpc.RRef]:
    for i in range(count):
        yield rpc.RRef(i)


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


def random_items(seed: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    chance = random.Random(seed)
    for i in range(count):
        yield i, torch.full((chance.choice([0, 1, 999, 1000, 2500, 2501, 50_000]),), i, dtype=torch.uint8)


def test_messages_about_streams_that_are_not_there(agents):
    a, b = agents(2)
    a.control.send(b.info, "stream.close", 1 << 50)
    for kind in ("OPENED", "ITEM", "CREDIT"):
        a.post(b.info, MessageType.Value(f"STREAM_{kind}"), None, header=lambda e: _name_stream(e, 1 << 50))
    a._network.send(b.info, agent_pb2.Envelope(id=1 << 50, type=MessageType.CANCEL).SerializeToString())
    assert a.request(b.info, Request(MessageType.CALL, (add, (1, 2), {}))).wait() == 3
    wait_until(lambda: not b.debug_info()["agent.server_active_calls"])
    assert b.debug_info()["num_consumed_streams"] == b.debug_info()["num_produced_streams"] == 0


def _name_stream(envelope: agent_pb2.Envelope, stream_id: int) -> None:
    envelope.stream.stream_id = stream_id


def test_the_consumer_dies(workers):
    a, b = workers.rpc(2)

    def start() -> None:
        stream = rpc.rpc_stream("worker1", watched, ("consumer died",), window_items=3)
        next(stream)
        remote_functions.keep(stream)

    a.run(start)
    a.kill()
    assert b.run(wait_for_event, "consumer died")
    b.run(assert_clean)


def test_the_producer_dies(workers):
    a, b = workers.rpc(2, rpc_timeout=0)

    def start() -> None:
        stream = rpc.rpc_stream("worker1", waits_between, ("never",))
        remote_functions.keep(stream)
        assert next(stream) == "first"

    def check() -> None:
        with pytest.raises(WorkerLostError, match="'worker1' is lost"):
            next(remote_functions.kept[-1])
        with pytest.raises(WorkerLostError, match="'worker1' is lost"):
            next(rpc.rpc_stream("worker1", count_to, (1,)))
        assert_clean()

    a.run(start)
    waiting = a.start(check)
    b.kill()
    waiting.result()


async def collect(stream: rpc.RpcStream) -> list[Any]:
    return [item async for item in stream]


def test_an_item_that_takes_too_long(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        stream = rpc.rpc_stream("worker1", waits, ("too late",), timeout=0.2)
        with pytest.raises(
            RpcTimeoutError, match=r"0\.2 s: waiting for the next item of a stream from worker 'worker1'"
        ):
            next(stream)
        assert next(stream, None) is None
        again = rpc.rpc_stream("worker1", waits, ("too late",), timeout=0.2)
        with pytest.raises(RpcTimeoutError):
            asyncio.run(collect(again))
        rpc.rpc_sync("worker1", set_event, ("too late",))
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


def large_items(total: int, nbytes: int) -> Iterator[dict[str, Any]]:
    """Each item says how much the producer has buffered when it makes it, and its memory."""
    process = psutil.Process()
    for i in range(total // nbytes):
        buffered = rpc.debug_info()["stream_bytes_sent"]
        tensor = torch.full((nbytes,), i % 251, dtype=torch.uint8)
        yield {"tensor": tensor, "buffered": buffered, "rss": process.memory_info().rss}


def return_freed_memory() -> None:
    """Has the C library give large blocks back when they are freed, so that memory is what is held."""
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
