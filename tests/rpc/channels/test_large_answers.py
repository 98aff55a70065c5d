"""Calls of a worker that does not read its answers are postponed, so the bytes of these answers are bounded."""

import asyncio
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.peers.flow_control import Backlog, Backlogs

from tests import remote_functions
from tests.remote_functions import assert_clean, identity, set_event, wait_for, wait_until
from tests.rpc.calls.generators import count_to
from tests.rpc.requests.test_flow_control import KIB, MIB, connect, figures, limits
from tests.stopped import stopped

BOUND = 8 * MIB
ANSWER = 2 * MIB
CALLS = 20


def filled(number: int, nbytes: int) -> torch.Tensor:
    """Returns a tensor of this many bytes, when it may."""
    wait_for("go")
    return torch.full((nbytes,), number % 256, dtype=torch.uint8)


def start_calls(count: int, nbytes: int) -> None:
    remote_functions.kept.extend(rpc.rpc_async("worker1", filled, (n, nbytes), timeout=0) for n in range(count))


def check_answers(count: int, nbytes: int) -> None:
    for number, future in enumerate(remote_functions.kept):
        tensor = future.wait()
        assert tensor.nbytes == nbytes
        assert (tensor == number % 256).all()
    assert len(remote_functions.kept) == count
    remote_functions.kept.clear()


def go() -> int:
    """Lets `filled` return; returns how many calls have begun."""
    begun = rpc.debug_info()["agent.server_active_calls"]
    set_event("go")
    return begun


def threads() -> int:
    """Returns how many threads run calls, or have run some: one is added where calls make others wait."""
    return sum(each.name.startswith("gradwire-worker1-") for each in threading.enumerate())


def calls_that_have_arrived() -> int:
    """Returns how many calls of worker0 run, or wait for a thread."""
    return figures("worker0")["received_requests"] + rpc.debug_info()["agent.server_active_calls"]


@pytest.mark.parametrize(
    ("transports", "nbytes"),
    [
        (("unix", "grpc"), ANSWER),
        (("tcp", "grpc"), ANSWER),
        (("tcp", "grpc"), 100 * KIB),
        (("grpc",), ANSWER),
        (("grpc",), 100 * KIB),
    ],
    ids=["beside shared memory", "bulk", "socket", "chunks", "stream"],
)
def test_answers_to_a_stopped_worker_are_bounded(workers, transports, nbytes):
    """Those that are in shared memory have a bound of their own: here there is none."""
    a, b, c = workers.rpc(
        3,
        rpc_timeout=0,
        num_worker_threads=2,
        transports=transports,
        channels=rpc.ChannelOptions(max_shared_bytes=1),
        flow_control=limits(max_unsent_bytes=BOUND),
    )
    count = CALLS * ANSWER // nbytes
    a.run(connect)
    a.run(start_calls, count, nbytes)
    b.run(wait_until, lambda: calls_that_have_arrived() == count)
    with stopped(a):
        begun = b.run(go)  # one more at times: a thread is added now and then as long as they wait
        b.run(wait_until, lambda: not calls_that_have_arrived())
        found = b.run(figures, "worker0")
        assert 0 < found["postponed_requests"] < count
        # A sixteenth is sent between two looks, and calls that have begun are answered.
        running = begun + b.run(threads)
        assert BOUND // 2 < found["send_queue_bytes"] <= BOUND + BOUND // 16 + (running + 2) * ANSWER
        assert not found["reading_paused"]
        assert c.run(rpc.rpc_sync, "worker1", identity, (torch.ones(MIB),)).sum() == MIB
    a.run(check_answers, count, nbytes)
    b.run(wait_until, lambda: not figures("worker0")["postponed_requests"])
    b.run(wait_until, lambda: not figures("worker0")["send_queue_bytes"])


def test_the_calls_of_a_worker_that_is_killed_are_not_postponed_for_ever(workers):
    a, b = workers.rpc(
        2, num_worker_threads=2, transports=("tcp", "grpc"), flow_control=limits(max_unsent_bytes=MIB)
    )
    a.run(start_calls, CALLS, ANSWER)
    b.run(wait_until, lambda: calls_that_have_arrived() == CALLS)
    os.kill(a.pid, signal.SIGSTOP)
    b.run(set_event, "go")
    b.run(wait_until, lambda: figures("worker0")["postponed_requests"])
    a.kill()
    b.run(wait_until, lambda: not figures("worker0")["postponed_requests"])
    b.run(assert_clean)


def postpone_calls_of_worker0() -> None:
    agent: Any = current_agent()
    backlog = agent.peers.by_id[0].backlog
    backlog.postponed = []
    agent._server.backlogs.full.append(backlog)


def resume_calls() -> None:
    agent: Any = current_agent()
    agent._network.call_soon(agent._server.backlogs._check)


def test_only_calls_are_postponed(workers):
    """Not the items of a stream, for one: nothing answers them."""
    a, b = workers.rpc(2, rpc_timeout=0)
    b.run(postpone_calls_of_worker0)
    call = a.start(rpc.rpc_sync, "worker1", identity, (5,))
    b.run(wait_until, lambda: figures("worker0")["postponed_requests"] == 1)
    assert b.run(lambda: list(rpc.rpc_stream("worker0", count_to, (500,)))) == list(range(500))
    assert b.run(lambda: rpc.remote("worker0", identity, (7,)).to_here()) == 7
    assert not call.done()
    b.run(resume_calls)
    assert call.result() == 5


def echo_back(to: str, data: bytes) -> bytes:
    """Returns the data after a call back with it, whose answer is as large."""
    return rpc.rpc_sync(to, identity, (data,))


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc"), ("grpc",)], ids=lambda kinds: kinds[0])
def test_large_answers_in_both_directions(workers, transports):
    """Each worker has more answers for the other one than are read at a time, and each call makes one back."""
    options = limits(
        max_in_flight=100, max_received=2, max_unsent_bytes=256 * KIB, max_total_unsent_bytes=256 * KIB
    )
    channels = rpc.ChannelOptions(max_shared_bytes=1)
    a, b = workers.rpc(2, rpc_timeout=0, transports=transports, flow_control=options, channels=channels)

    def check(to: str, back: str) -> None:
        data = [bytes([number]) * size for number, size in enumerate([100, 50 * KIB, 300 * KIB])]
        futures = [rpc.rpc_async(to, echo_back, (back, data[number % 3])) for number in range(150)]
        for number, future in enumerate(futures):
            assert future.wait() == data[number % 3]

    pending = [a.start(check, "worker1", "worker0"), b.start(check, "worker0", "worker1")]
    for each in pending:
        each.result()
    for worker, other in ((a, "worker1"), (b, "worker0")):
        worker.run(wait_until, lambda other=other: not figures(other)["postponed_requests"])


WORKERS = [rpc.WorkerInfo(f"worker{number}", number) for number in range(3)]


class Queues:
    """The bytes that are queued for each worker."""

    def __init__(self) -> None:
        self.bytes = [0, 0, 0]
        self.backlogs = [Backlog(worker, partial(self.queued_bytes, worker.id)) for worker in WORKERS]
        self.soon: list[Any] = []
        """What is to be called on the event loop."""

    def queued_bytes(self, worker: int) -> int:
        return self.bytes[worker]

    def call_soon(self, function: Any) -> None:
        self.soon.append(function)


def look_again(postponed: Backlogs) -> None:
    """Does what the event loop does from time to time while calls wait."""

    async def check() -> None:
        postponed._check()

    asyncio.run(check())


def postponed_calls(queues: Queues, postponed: Backlogs, resumed: list[int]) -> list[bool]:
    """Has a call of each worker arrive; returns which of them are postponed. Resuming one adds its worker's id."""
    return [postponed.add(each, partial(resumed.append, each.worker.id)) for each in queues.backlogs]


def test_calls_are_postponed_until_half_is_sent():
    queues = Queues()
    postponed = Backlogs(limits(max_unsent_bytes=160 * KIB), queues.call_soon)
    resumed: list[int] = []
    for _ in range(16):
        queues.bytes[0] += 10 * KIB
        postponed.on_answer(queues.backlogs[0], 10 * KIB)
    assert postponed_calls(queues, postponed, resumed) == [False, False, False]
    queues.bytes[0] += 10 * KIB
    postponed.on_answer(queues.backlogs[0], 10 * KIB)
    for count in (1, 2):
        assert postponed_calls(queues, postponed, resumed) == [True, False, False]
        assert postponed.figures(queues.backlogs[0]) == {"postponed_requests": count}
    for nbytes in (170 * KIB, 80 * KIB + 1):
        queues.bytes[0] = nbytes
        look_again(postponed)
        assert not resumed
    queues.bytes[0] = 80 * KIB
    look_again(postponed)
    assert resumed == [0, 0]
    assert len(queues.soon) == 1
    assert postponed_calls(queues, postponed, resumed) == [False, False, False]


def test_the_queue_is_looked_at_now_and_then():
    queues = Queues()
    postponed = Backlogs(limits(max_unsent_bytes=160 * KIB), queues.call_soon)
    queues.bytes[0] = 200 * KIB
    for _ in range(9):
        postponed.on_answer(queues.backlogs[0], KIB)
    assert not postponed.full
    postponed.on_answer(queues.backlogs[0], KIB)
    assert postponed.full


def test_the_sum_over_workers_is_bounded_and_leaves_out_those_that_read():
    queues = Queues()
    postponed = Backlogs(limits(max_unsent_bytes=100 * KIB, max_total_unsent_bytes=150 * KIB), queues.call_soon)
    resumed: list[int] = []

    def answer_all(*queued: int) -> None:
        queues.bytes = [nbytes * KIB for nbytes in queued]
        for backlog in queues.backlogs:
            postponed.on_answer(backlog, 100 * KIB)

    answer_all(90, 0, 50)
    assert postponed_calls(queues, postponed, resumed) == [False, False, False]
    answer_all(90, 0, 70)
    assert postponed_calls(queues, postponed, resumed) == [False, False, True]
    answer_all(90, 0, 70)
    assert postponed_calls(queues, postponed, resumed) == [True, False, True]
    queues.bytes = [90 * KIB, 0, 0]
    look_again(postponed)
    assert resumed == [2, 2]  # nothing is queued for it, and the other one has more than half of the sum
    queues.bytes = [50 * KIB, 0, 0]
    look_again(postponed)
    assert resumed == [2, 2, 0]
    answer_all(0, 90, 0)  # what was seen in the first queue is not counted any more
    answer_all(0, 0, 70)
    assert postponed_calls(queues, postponed, resumed) == [False, False, False]
