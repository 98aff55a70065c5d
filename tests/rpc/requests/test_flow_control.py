"""What waits for a worker that is stopped, slow or lost is bounded, and waits for nobody else."""

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import NotInitializedError, RpcTimeoutError, SendQueueFullError, WorkerLostError
from gradwire.rpc import aio

from tests import remote_functions
from tests.remote_functions import add, assert_clean, identity, keep, set_event, wait_for, wait_until
from tests.stopped import stopped

KIB = 1 << 10
MIB = 1 << 20


def limits(**options: Any) -> rpc.FlowControlOptions:
    return rpc.FlowControlOptions(**options)


def figures(name: str = "worker1") -> dict[str, int]:
    return rpc.debug_info()["flow_control"][name]


def assert_nothing_in_flight(name: str = "worker1") -> None:
    counts = "calls_in_flight", "waiting_calls", "bytes_in_flight"
    wait_until(lambda: not any(figures(name)[each] for each in counts))


def in_thread(function: Any, *args: Any) -> None:
    """Runs a function on another thread of this worker; `result_of_thread` returns its result or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(*args), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    remote_functions.kept.append((thread, outcome))


def result_of_thread() -> Any:
    thread, outcome = remote_functions.kept.pop()
    thread.join(60)
    assert outcome, "the thread still waits"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def call_many(count: int, nbytes: int = 0, timeout: float = 0) -> int:
    """Makes calls that carry `nbytes` each; returns how many were answered."""
    value = bytes(nbytes)
    futures = [rpc.rpc_async("worker1", identity, (value,), timeout=timeout) for _ in range(count)]
    return sum(len(future.wait()) == nbytes for future in futures)


def connect() -> None:
    assert rpc.rpc_sync("worker1", add, (1, 1)) == 2


def test_calls_to_a_stopped_worker_wait_and_go_on(workers):
    a, b, _ = workers.rpc(3, flow_control=limits(max_in_flight=50))
    a.run(connect)

    def check() -> None:
        in_thread(call_many, 200, 100 * KIB)
        wait_until(lambda: figures()["waiting_calls"] == 1)
        assert figures()["calls_in_flight"] == 50
        assert 50 * 100 * KIB <= figures()["bytes_in_flight"] <= 50 * 102 * KIB
        assert 0 < figures()["send_queue_bytes"] <= 50 * 102 * KIB
        for _ in range(100):
            assert rpc.rpc_sync("worker2", add, (1, 1)) == 2
        assert figures()["waiting_calls"] == 1
        assert figures()["calls_in_flight"] == 50

    with stopped(b):
        a.run(check)
    assert a.run(result_of_thread) == 200
    a.run(assert_nothing_in_flight)


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc"), ("grpc",)], ids=lambda kinds: kinds[0])
def test_bytes_to_a_stopped_worker_are_bounded(workers, transports):
    """Also before it is connected to."""
    a, b = workers.rpc(2, transports=transports, flow_control=limits(max_in_flight_bytes=4 * MIB))

    def check() -> None:
        in_thread(call_many, 20, 500 * KIB)
        wait_until(lambda: figures()["waiting_calls"] == 1)
        assert figures()["calls_in_flight"] == 8
        assert figures()["bytes_in_flight"] <= 4 * MIB

    with stopped(b):
        a.run(check)
    assert a.run(result_of_thread) == 20
    a.run(assert_nothing_in_flight)


def test_a_call_larger_than_the_bound_is_sent_alone(workers):
    a, b = workers.rpc(2, flow_control=limits(max_in_flight_bytes=MIB))
    tensor = torch.ones(2 * MIB)

    def check() -> None:
        in_thread(lambda: [rpc.rpc_async("worker1", add, (tensor, 1)) for _ in range(2)])
        wait_until(lambda: figures()["waiting_calls"] == 1)
        assert figures()["calls_in_flight"] == 1

    a.run(connect)
    with stopped(b):
        a.run(check)
    assert a.run(lambda: [int(future.wait()[0]) for future in result_of_thread()]) == [2, 2]
    a.run(assert_nothing_in_flight)


def test_calls_raise_if_the_options_say_so(workers):
    a, b = workers.rpc(2, flow_control=limits(max_in_flight=3, when_full="raise"))

    def check() -> None:
        for _ in range(3):
            keep(rpc.rpc_async("worker1", add, (1, 1)))
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(SendQueueFullError, match=r"'worker1' was not sent: .* max_in_flight=3") as caught:
                call("worker1", add, (1, 1))
        assert (caught.value.worker, caught.value.option, caught.value.limit) == ("worker1", "max_in_flight", 3)
        failed, fine = rpc.broadcast_call(["worker1", "worker0"], add, (1, 1))
        assert fine.wait() == 2
        with pytest.raises(SendQueueFullError):
            failed.wait()
        assert figures()["calls_in_flight"] == 3

    a.run(connect)
    with stopped(b):
        a.run(check)
    assert a.run(lambda: [future.wait() for future in remote_functions.kept]) == [2, 2, 2]
    a.run(assert_nothing_in_flight)


def test_calls_that_time_out_stay_in_flight(workers):
    """Otherwise each timeout would let another call into the queue of a worker that is stopped."""
    a, b = workers.rpc(2, flow_control=limits(max_in_flight=4))

    def check() -> None:
        texts = []
        for _ in range(8):
            with pytest.raises(RpcTimeoutError, match=r"a call to worker 'worker1'") as caught:
                rpc.rpc_sync("worker1", identity, (bytes(KIB),), timeout=0.1)
            texts.append(str(caught.value))
        assert ["not sent, because too much is in flight" in text for text in texts] == [False] * 4 + [True] * 4
        assert figures()["calls_in_flight"] == 4
        assert figures()["waiting_calls"] == 0
        assert rpc.debug_info()["agent.client_active_calls"] == 0

    a.run(connect)
    with stopped(b):
        a.run(check)
    a.run(assert_nothing_in_flight)
    a.run(connect)


def test_a_call_that_waits_for_a_lost_worker_fails(workers):
    a, b = workers.rpc(2, flow_control=limits(max_in_flight=2))

    def start() -> None:
        keep([rpc.rpc_async("worker1", wait_for, ("never",), timeout=0) for _ in range(2)])
        in_thread(rpc.rpc_async, "worker1", add, (1, 1), None, 0)
        wait_until(lambda: figures()["waiting_calls"] == 1)

    def check() -> None:
        with pytest.raises(WorkerLostError, match="'worker1'"):
            result_of_thread().wait()
        assert_nothing_in_flight()

    a.run(start)
    b.kill()
    a.run(check)


def test_a_call_that_waits_fails_at_shutdown(workers):
    a, _ = workers.rpc(2, flow_control=limits(max_in_flight=1))

    def check() -> None:
        keep(rpc.rpc_async("worker1", wait_for, ("never",), timeout=0))
        in_thread(rpc.rpc_async, "worker1", add, (1, 1), None, 0)
        wait_until(lambda: figures()["waiting_calls"] == 1)
        rpc.shutdown(graceful=False)
        with pytest.raises(NotInitializedError, match="shut down"):
            result_of_thread().wait()

    a.run(check)


def test_ctrl_c_ends_the_wait(workers):
    a, b = workers.rpc(2, flow_control=limits(max_in_flight=1))

    def check() -> None:
        keep(rpc.rpc_async("worker1", wait_for, ("release",), timeout=0))
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_async("worker1", add, (1, 1), timeout=0)
        assert figures()["waiting_calls"] == 0
        assert figures()["calls_in_flight"] == 1

    pending = a.start(check)
    # From another process: Python loses a signal that comes while its main thread passes the interpreter on to the
    # thread that sends it, and then waits for a lock.
    b.run(wait_until, lambda: rpc.rpc_sync("worker0", figures)["waiting_calls"] == 1)
    os.kill(a.pid, signal.SIGINT)
    pending.result()


def descend(to: str, back: str, depth: int) -> int:
    """Calls itself on the other worker, `depth` times."""
    return 1 + rpc.rpc_sync(to, descend, (back, to, depth - 1)) if depth else 0


def descend_in_callback(to: str, back: str, depth: int) -> int:
    if not depth:
        return 0
    first = rpc.rpc_async(to, add, (1, 0))
    return first.then(lambda one: one.wait() + rpc.rpc_sync(to, descend, (back, to, depth))).wait()


@pytest.mark.parametrize("function", [descend, descend_in_callback])
def test_nested_calls_do_not_deadlock_at_the_bound(workers, function):
    """Calls of all depths are in flight between the two workers, in both directions, and only one fits."""
    a, b = workers.rpc(2, rpc_timeout=0, flow_control=limits(max_in_flight=1, max_received=1))

    def check(to: str, back: str) -> None:
        for _ in range(3):
            futures = [rpc.rpc_async(to, function, (back, to, depth)) for depth in (20, 0, 5)]
            extra = 0 if function is descend else 1
            assert [future.wait() for future in futures] == [20 + extra, 0, 5 + extra]
        assert_nothing_in_flight(to)

    pending = [a.start(check, "worker1", "worker0"), b.start(check, "worker0", "worker1")]
    for each in pending:
        each.result()


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("grpc",)], ids=lambda kinds: kinds[0])
def test_both_directions_full(workers, transports):
    """Each worker has more for the other one than is read, and each call makes one back."""
    options = limits(max_in_flight=200, max_received=2, max_received_bytes=128 * KIB)
    a, b = workers.rpc(2, rpc_timeout=0, transports=transports, flow_control=options)

    def check(to: str, back: str) -> None:
        futures = [rpc.rpc_async(to, call_back, (back, bytes(50 * KIB))) for _ in range(300)]
        assert sum(future.wait() for future in futures) == 300 * 50 * KIB
        assert_nothing_in_flight(to)
        assert not figures(to)["reading_paused"]

    pending = [a.start(check, "worker1", "worker0"), b.start(check, "worker0", "worker1")]
    for each in pending:
        each.result()


def call_back(to: str, data: bytes) -> int:
    return len(rpc.rpc_sync(to, identity, (data,)))


def test_calls_that_are_passed_on_to_a_stopped_worker_wait(workers):
    """Also if the functions that pass them on do not wait for their results: then those calls wait in turn."""
    a, b, c = workers.rpc(3, flow_control=limits(max_in_flight=5))
    a.run(connect)

    def start() -> None:
        in_thread(lambda: [rpc.rpc_async("worker0", pass_on, timeout=0) for _ in range(20)])

    def check(name: str, waiting: int) -> None:
        wait_until(lambda: figures(name)["waiting_calls"] == waiting)
        assert figures(name)["calls_in_flight"] == 5

    with stopped(b):
        c.run(start)
        a.run(check, "worker1", 5)
        c.run(check, "worker0", 1)  # now that none of its calls ends any more
    assert c.run(lambda: [future.wait() for future in result_of_thread()]) == [None] * 20
    c.run(assert_nothing_in_flight, "worker0")
    a.run(assert_nothing_in_flight)


def pass_on() -> None:
    rpc.rpc_async("worker1", add, (1, 1), timeout=0)


def test_broadcast_calls_of_several_threads_at_the_bound(workers):
    """Each needs all of its receivers, and only one fits at each of them."""
    options = rpc.BroadcastOptions(threshold=16 * KIB)
    a, _, _ = workers.rpc(3, rpc_timeout=0, flow_control=limits(max_in_flight=1), broadcasts=options)

    def check() -> None:
        for names in (["worker1", "worker2"], ["worker2", "worker1"], ["worker2", "worker1"]):
            in_thread(broadcast_many, names)
        assert [result_of_thread() for _ in range(3)] == [[2 * 10] * 2] * 3
        assert_nothing_in_flight()
        assert_nothing_in_flight("worker2")

    a.run(check)


def broadcast_many(names: list[str]) -> list[int]:
    calls = [rpc.broadcast_call(names, add, (torch.ones(10 * KIB), 1)) for _ in range(10)]
    return [sum(int(futures[index].wait()[0]) for futures in calls) for index in range(len(names))]


def test_a_worker_that_runs_few_calls_reads_no_more_than_it_may(workers):
    """What it does not read stays with the sender, whose calls wait."""
    options = limits(max_in_flight_bytes=8 * MIB, max_received=4)
    a, b = workers.rpc(2, rpc_timeout=0, num_worker_threads=1, flow_control=options)

    def check_receiver() -> None:
        wait_until(lambda: figures("worker0")["reading_paused"])
        # One read may bring some more than the bound: 256 KiB, so two of these calls.
        assert figures("worker0")["received_requests"] <= 4 + 3
        set_event("go")

    a.run(connect)
    pending = [a.start(check_sender_of_slow_calls), b.start(check_receiver)]
    for each in pending:
        each.result()


def wait_and_measure(data: bytes) -> int:
    wait_for("go")
    return len(data)


def check_sender_of_slow_calls() -> None:
    futures = []
    for _ in range(200):
        futures.append(rpc.rpc_async("worker1", wait_and_measure, (bytes(100 * KIB),)))
        assert figures()["bytes_in_flight"] <= 8 * MIB
        assert figures()["send_queue_bytes"] <= 9 * MIB  # of which 1 MiB may have arrived
    assert sum(future.wait() for future in futures) == 200 * 100 * KIB


def test_the_sum_over_workers_leaves_each_worker_a_call(workers):
    a, b, _ = workers.rpc(3, flow_control=limits(max_in_flight=3, max_total_in_flight=3))

    def check() -> None:
        in_thread(call_many, 4)
        wait_until(lambda: figures()["waiting_calls"] == 1)
        for _ in range(50):
            assert rpc.rpc_sync("worker2", add, (1, 1)) == 2
        in_thread(lambda: [rpc.rpc_async("worker2", wait_for, ("release",)) for _ in range(2)])
        wait_until(lambda: figures("worker2")["waiting_calls"] == 1)
        assert figures("worker2")["calls_in_flight"] == 1
        assert figures()["calls_in_flight"] == 3

    def finish() -> None:
        second = result_of_thread()
        rpc.rpc_sync("worker2", set_event, ("release",))
        assert [future.wait() for future in second] == ["release"] * 2
        assert result_of_thread() == 4
        assert_nothing_in_flight()
        assert_nothing_in_flight("worker2")

    a.run(connect)
    with stopped(b):
        a.run(check)
    a.run(finish)


def test_an_event_loop_is_not_blocked(workers):
    a, _ = workers.rpc(2, flow_control=limits(max_in_flight=2))

    async def check() -> None:
        rref = rpc.remote("worker1", add, (1, 2))
        assert await rref.to_here_async() == 3
        held = [rpc.rpc_async("worker1", wait_for, ("release",), timeout=0) for _ in range(2)]
        with pytest.raises(SendQueueFullError, match=r"await aio\.call"):
            rpc.rpc_async("worker1", add, (1, 1))
        with pytest.raises(RpcTimeoutError):
            await aio.call("worker1", add, (1, 1), timeout=0.05)
        with pytest.raises(RpcTimeoutError):
            await rref.to_here_async(timeout=0.05)
        cancelled = asyncio.create_task(aio.call("worker1", add, (1, 1), timeout=0))
        waiting = [asyncio.create_task(aio.call("worker1", add, (i, 1), timeout=0)) for i in range(10)]
        await asyncio.sleep(0)
        assert figures()["waiting_calls"] == 11
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert figures()["waiting_calls"] == 10
        assert await aio.call("worker0", add, (1, 1)) == 2
        assert held[0].cancel()  # it runs already, and stays in flight
        keep([held, waiting, asyncio.get_running_loop()])
        done = asyncio.gather(*waiting)
        await asyncio.to_thread(release)
        assert await done == list(range(1, 11))

    a.run(lambda: asyncio.run(check()))
    a.run(assert_nothing_in_flight)
    a.run(assert_clean)


def release() -> None:
    """Has the calls to worker1 that wait for the event go on, by a worker that has capacity: itself."""
    rpc.rpc_sync("worker0", set_release_on_worker1)


def set_release_on_worker1() -> None:
    rpc.rpc_sync("worker1", set_event, ("release",))  # a nested call, and the only one


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"max_in_flight": 0}, ValueError, "max_in_flight is 0: give a whole number, at least 1"),
        ({"max_received_bytes": 1.5}, ValueError, r"max_received_bytes is 1\.5"),
        ({"max_in_flight": 8, "max_total_in_flight": 4}, ValueError, "more than max_total_in_flight=4"),
        ({"max_unsent_bytes": 8, "max_total_unsent_bytes": 4}, ValueError, "more than max_total_unsent_bytes=4"),
        ({"when_full": "drop"}, ValueError, "when_full is 'drop': give 'wait' or 'raise'"),
        ({"max_calls": 1}, TypeError, "max_calls"),
    ],
)
def test_options_are_checked(wrong, error, message):
    with pytest.raises(error, match=message):
        rpc.FlowControlOptions(**wrong)


def test_the_option_of_an_agent_is_checked():
    assert rpc.RpcBackendOptions().flow_control == rpc.FlowControlOptions()
    with pytest.raises(TypeError, match="flow_control is 5: give a FlowControlOptions"):
        rpc.RpcBackendOptions(flow_control=5)
