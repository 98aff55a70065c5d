"""Calls that are awaited, and calls that are cancelled."""

import asyncio
import random
import weakref
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RemoteError, RpcCancelledError, RpcTimeoutError
from gradwire.rpc import aio
from gradwire.rpc.contracts.messages import MessageType, Request

from tests import remote_functions
from tests.remote_functions import add, assert_clean, counts, identity, keep, set_event, wait_for, wait_until
from tests.stopped import stopped

MIB = 1 << 20


def fail(text: str) -> None:
    raise LookupError(text)


def keep_and_wait(name: str) -> rpc.RRef:
    keep(f"begun {name}")
    wait_for(name)
    keep(f"ended {name}")
    return rpc.RRef(name)


def keep_first(value: Any, *others: Any) -> None:
    keep(value)


def what_is_kept() -> list[Any]:
    return remote_functions.kept


async def call_from_a_remote_function(to: str) -> int:
    return sum(await asyncio.gather(*(aio.call(to, add, (i, 1)) for i in range(10))))


def run_in_a_loop(to: str) -> int:
    return asyncio.run(call_from_a_remote_function(to))


def test_calls_are_awaited(workers):
    a, b = workers.rpc(2)

    async def check() -> None:
        assert await aio.call("worker1", add, (1,), {"b": 2}) == 3
        assert await rpc.rpc_async("worker0", add, (1, 2)) == 3
        futures = [rpc.rpc_async("worker1", add, (i, 1)) for i in range(100)]
        assert await asyncio.gather(*futures) == list(range(1, 101))
        assert await futures[0] == 1  # again
        assert await aio.wait(futures[1].then(lambda f: f.wait() * 10)) == 20
        assert [f.wait() for f in await aio.wait(torch.futures.collect_all(futures[:3]))] == [1, 2, 3]
        with pytest.raises(LookupError, match="on purpose") as caught:
            await aio.call("worker1", fail, ("on purpose",))
        assert isinstance(caught.value.__cause__, RemoteError)
        with pytest.raises(RpcTimeoutError):
            await aio.call("worker1", wait_for, ("gate",), timeout=0.1)
        assert await aio.call("worker1", run_in_a_loop, ("worker0",)) == 55
        waiting = asyncio.gather(*(aio.call("worker1", wait_for, ("gate",)) for _ in range(20)))
        await aio.call("worker1", set_event, ("gate",))  # the loop is free meanwhile
        assert await waiting == ["gate"] * 20

    a.run(lambda: asyncio.run(check()))
    a.run(assert_clean)
    b.run(assert_clean)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_values_of_references_are_awaited(workers, to):
    a, b = workers.rpc(2)

    async def check() -> None:
        assert await rpc.remote(to, add, (1, 2)).to_here_async() == 3
        with pytest.raises(LookupError, match="on purpose"):
            await rpc.remote(to, fail, ("on purpose",)).to_here_async()
        rref = rpc.remote(to, wait_for, ("value",))
        with pytest.raises(RpcTimeoutError, match=r"0\.05 s"):
            await rref.to_here_async(timeout=0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rref.to_here_async(), 0.05)
        await aio.call(to, set_event, ("value",))
        assert not rref._get_future().cancel()  # others may have the reference by now
        assert await rref.to_here_async() == "value"  # the value has not been dropped
        assert await rref.rpc_async().upper() == "VALUE"

    a.run(lambda: asyncio.run(check()))
    a.run(assert_clean)
    b.run(assert_clean)


def test_a_cancelled_call_that_is_queued_is_not_sent(workers):
    """The peer is stopped before it is connected to, and later serves the calls that were not cancelled."""
    a, b = workers.rpc(2)

    async def check() -> None:
        rref = rpc.RRef("here")
        tensor = torch.zeros(64 * MIB, dtype=torch.uint8)
        alive = weakref.ref(tensor)
        futures = [rpc.rpc_async("worker1", keep_first, ("cancelled", rref, tensor)) for _ in range(5)]
        remote_functions.kept.append(rpc.rpc_async("worker1", keep, ("first",)))
        task = asyncio.create_task(aio.call("worker1", keep_first, ("cancelled", rref)))
        await asyncio.sleep(0)
        remote_functions.kept.append(rpc.rpc_async("worker1", keep, ("second",)))
        assert rpc.debug_info()["num_forks"] == 6
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(future.cancel() for future in futures)
        assert not any(future.cancel() for future in futures)
        with pytest.raises(RpcCancelledError, match="'worker1' was cancelled") as caught:
            await futures[0]
        assert caught.value.worker == "worker1"
        del rref, tensor, futures, caught
        wait_until(lambda: counts()["num_forks"] == counts()["num_owner_rrefs"] == 0)
        wait_until(lambda: alive() is None)
        assert rpc.debug_info()["agent.client_active_calls"] == 2

    def after() -> None:
        for future in remote_functions.kept:
            future.wait()
        assert sorted(rpc.rpc_sync("worker1", what_is_kept)) == ["first", "second"]  # they ran side by side
        assert rpc.rpc_sync("worker1", add, (torch.zeros(MIB), 1)).sum() == MIB
        assert_clean()

    with stopped(b):
        a.run(lambda: asyncio.run(check()))
    a.run(after)
    b.run(assert_clean)


def test_a_cancelled_call_that_was_sent_in_part_does_not_run(workers):
    a, b = workers.rpc(2, transports=("tcp", "grpc"))  # so that large payloads are sent in chunks

    def start() -> None:
        rref = rpc.RRef("here")
        # Larger than all buffers between the two workers.
        future = rpc.rpc_async("worker1", keep_first, ("cancelled", rref, torch.zeros(64 * MIB)))
        behind = rpc.rpc_async("worker1", keep_first, ("behind", rref, torch.zeros(MIB)))
        late = rpc.rpc_async("worker1", keep_first, ("not this one", rref, torch.zeros(MIB)))
        assert future.cancel()
        assert late.cancel()
        with pytest.raises(RpcCancelledError):
            future.wait()
        remote_functions.kept.append(behind)

    def after() -> None:
        remote_functions.kept.pop().wait()
        assert rpc.rpc_sync("worker1", what_is_kept) == ["behind"]
        assert_clean()

    a.run(rpc.rpc_sync, "worker1", add, (torch.zeros(MIB), 1))
    with stopped(b):
        a.run(start)
    a.run(after)
    b.run(assert_clean)


def test_a_cancelled_call_that_waits_for_a_thread_does_not_run(agents):
    a, b = agents(2)
    run, waiting = b._executor.submit, []
    b._executor.submit = lambda *task: waiting.append(task)  # the threads of b are all taken
    futures = [a.request(b.info, Request(MessageType.CALL, (keep, (f"call {i}",), {}))) for i in range(3)]
    wait_until(lambda: len(waiting) == 3)
    assert futures[1].cancel()
    wait_until(lambda: len(b._server.waiting) == 2)
    b._executor.submit = run
    for task in waiting:
        run(*task)
    assert futures[0].wait() + futures[2].wait() > 0
    wait_until(lambda: b.debug_info()["agent.server_active_calls"] == 0)
    assert {"call 0", "call 2"} <= set(remote_functions.kept)
    assert "call 1" not in remote_functions.kept
    assert not len(b._server.waiting)


def test_a_running_call_is_not_interrupted(workers):
    a, b = workers.rpc(2)

    async def check() -> None:
        task = asyncio.create_task(aio.call("worker1", keep_and_wait, ("running",)))
        while not await aio.call("worker1", what_is_kept):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rpc.debug_info()["agent.client_active_calls"] == 0
        shielded = asyncio.create_task(aio.call("worker1", keep_and_wait, ("shielded",)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(shielded), 0.05)
        while len(kept := await aio.call("worker1", what_is_kept)) < 2:
            pass
        assert kept == ["begun running", "begun shielded"]
        for name in ("running", "shielded"):
            await aio.call("worker1", set_event, (name,))
        assert await (await shielded).to_here_async() == "shielded"
        while len(kept) < 4:
            kept = await aio.call("worker1", what_is_kept)
        assert set(kept[2:]) == {"ended running", "ended shielded"}

    a.run(lambda: asyncio.run(check()))
    a.run(assert_clean)
    b.run(assert_clean)


def test_a_cancelled_call_runs_once_or_not_at_all(workers):
    a, b = workers.rpc(2)

    def check() -> None:
        chance = random.Random(3)
        rref = rpc.RRef("here")
        calls = []
        for i in range(300):
            size = chance.choice([1, 1000, 300_000])
            calls.append(rpc.rpc_async("worker1", keep_first, (i, rref, torch.zeros(size))))
            if chance.random() < 0.5:
                chance.choice(calls[-20:]).cancel()
        cancelled = set()
        for i, future in enumerate(calls):
            try:
                future.wait()
            except RpcCancelledError:
                cancelled.add(i)
        rpc.rpc_sync("worker1", add, (torch.zeros(MIB), 1))
        kept = rpc.rpc_sync("worker1", what_is_kept)
        assert len(kept) == len(set(kept))
        assert set(range(300)) - cancelled <= set(kept)
        assert 0 < len(cancelled) < 280
        del rref, calls, future
        assert_clean()

    a.run(check)
    b.run(assert_clean)


def test_calls_to_oneself_are_cancelled_too(workers):
    (a,) = workers.rpc(1)

    def check() -> None:
        future = rpc.rpc_async("worker0", wait_for, ("self",))
        large = rpc.rpc_async("worker0", identity, (torch.zeros(MIB),))
        assert future.cancel()
        large.cancel()
        set_event("self")
        with pytest.raises(RpcCancelledError):
            future.wait()
        done = rpc.rpc_async("worker0", add, (1, 1))
        assert done.wait() == 2
        assert not done.cancel()
        assert_clean()

    a.run(check)


def test_shutdown_after_cancelling(workers):
    a, b = workers.rpc(2)

    def cancel() -> None:
        future = rpc.rpc_async("worker1", wait_for, ("shutdown",))
        future.cancel()
        remote_functions.kept.append(future)

    a.run(cancel)
    b.run(set_event, "shutdown")
    workers.each([a, b], rpc.shutdown)
    assert a.run(lambda: remote_functions.kept[-1].cancel()) is False
