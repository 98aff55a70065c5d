"""A thread that waits for an answer reads the socket itself, and loses nothing when it is interrupted."""

import concurrent.futures
import gc
import os
import random
import signal
import sys
import threading
from collections import deque
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcCancelledError
from gradwire.rpc.execution.futures import Future
from gradwire.rpc.execution.interruptions import acquire
from gradwire.rpc.execution.poller import SocketWaiter

from tests.remote_functions import identity, set_event, wait_for, wait_until
from tests.rpc.channels.segments import MIB, segments_in_use, used_bytes
from tests.rpc.execution.interruption import ctrl_c_within

ELEMENTS = MIB // 8
"""Of a tensor that travels in a segment."""


def wait_and_interrupt(rounds: int) -> int:
    """Interrupts the main thread at random moments while it waits for answers; returns how often."""
    interrupts = turn = 0
    chance = random.Random(0)
    for number in range(rounds):
        future: torch.futures.Future[int] | None = None
        try:
            with ctrl_c_within(1e-3, chance):
                while True:
                    turn += 1
                    future = rpc.rpc_async(f"worker{1 + turn % 2}", identity, (number,))
                    assert future.wait_for_answer() == number
        except KeyboardInterrupt:
            interrupts += 1
        assert future is None or future.wait() == number
        for name in ("worker1", "worker2"):
            assert rpc.rpc_sync(name, identity, (-number,)) == -number
    return interrupts


def nothing_is_pending() -> bool:
    info = rpc.debug_info()
    return not (
        info["agent.client_active_calls"]
        or info["unanswered_calls"]
        or any(figures["calls_in_flight"] for figures in info["flow_control"].values())
    )


@pytest.mark.parametrize("transports", [("unix", "grpc"), ("tcp", "grpc")], ids=lambda names: names[0])
def test_an_interrupted_wait_loses_no_answer(workers, transports):
    a, *_ = workers.rpc(3, transports=transports)
    assert a.run(wait_and_interrupt, 300) == 300
    a.run(wait_until, nothing_is_pending)
    assert a.run(lambda: rpc.debug_info()["transports"]["worker1"]) == transports[0]


def interrupt_large_answers(rounds: int) -> int:
    """Does what `wait_and_interrupt` does with answers that lie in segments."""
    interrupts = 0
    chance = random.Random(1)
    kept: deque[tuple[int, torch.Tensor]] = deque(maxlen=4)
    for number in range(rounds):
        tensor = torch.full((ELEMENTS,), number)
        futures: list[Future[torch.Tensor]] = []
        try:
            with ctrl_c_within(1e-3, chance):
                while True:
                    futures.append(rpc.rpc_async("worker1", identity, (tensor,)))
                    futures[-1].wait_for_answer()
        except KeyboardInterrupt:
            interrupts += 1
        received = [future.wait() for future in futures]
        assert all(torch.equal(each, tensor) for each in received)
        kept.append((number, received[-1] if received else tensor))
        # A segment that is given back while its bytes are in use is filled with others.
        assert all(bool((each == filled).all()) for filled, each in kept)
    return interrupts


def test_an_interrupted_wait_loses_no_segment(two_workers):
    a, b = two_workers
    assert a.run(interrupt_large_answers, 100) == 100
    a.run(wait_until, nothing_is_pending)
    for worker in (a, b):
        worker.run(wait_until, lambda: gc.collect() >= 0 and segments_in_use() == (0, 0))


def test_a_segment_comes_back_with_the_answer(two_workers):
    a, _ = two_workers

    def needs_one_segment(elements: int) -> bool:
        before = used_bytes()
        tensor = torch.ones(elements)
        for _ in range(100):
            assert torch.equal(rpc.rpc_sync("worker1", identity, (tensor,)), tensor)
        return used_bytes() - before == 4 * elements

    # If another thread completes a call, as happens now and then, it may have the value when the next is sent.
    assert any(a.run(needs_one_segment, ELEMENTS << number) for number in range(3))


def call_in_handler(count: int) -> list[str]:
    """Waits for calls that end when the handler of a signal, meanwhile, has made calls to the same worker."""
    names = [f"handler {number}" for number in range(count)]
    seen = []

    begun = threading.Event()

    def handler(*_: object) -> None:
        if begun.is_set():
            return
        begun.set()
        seen.append(rpc.rpc_sync("worker1", identity, (names[len(seen)],)))
        rpc.rpc_sync("worker1", set_event, (seen[-1],))

    signal.signal(signal.SIGALRM, handler)
    for name in names:
        interrupting = threading.Thread(target=interrupt_when_it_waits, args=(threading.get_ident(), begun))
        begun.clear()
        interrupting.start()
        assert rpc.rpc_sync("worker1", wait_for, (name,)) == name
        interrupting.join()
    return seen


def interrupt_when_it_waits(thread: int, begun: threading.Event) -> None:
    """Sends signals to this process when a thread, with this ident, waits for an answer, until the handler begins.

    Python does not run the handler of a signal that comes just before a system call blocks.
    """
    waits = {SocketWaiter.wait.__code__, acquire.__code__}
    while sys._current_frames()[thread].f_code not in waits:
        pass
    os.kill(os.getpid(), signal.SIGALRM)
    while not begun.wait(0.1):
        os.kill(os.getpid(), signal.SIGALRM)


def test_a_signal_handler_may_call_the_worker_that_is_waited_for(two_workers):
    assert two_workers[0].run(call_in_handler, 10) == [f"handler {number}" for number in range(10)]


def receive_in_inference_mode() -> list[bool]:
    with torch.inference_mode():
        received = [rpc.rpc_sync("worker1", torch.ones, (size,)) for size in (2, 20_000)]
    return [tensor.is_inference() for tensor in received]


def test_received_tensors_do_not_depend_on_the_mode_of_the_thread_that_waits(two_workers):
    assert two_workers[0].run(receive_in_inference_mode) == [False, False]


def call_back(value: Any) -> Any:
    return rpc.rpc_sync("worker0", identity, (value,))


def test_a_call_arrives_while_the_main_thread_waits_on_its_socket(two_workers):
    a, _ = two_workers
    for number in range(20):
        assert a.run(rpc.rpc_sync, "worker1", call_back, (number,)) == number


def test_a_callback_may_call_the_worker_that_is_waited_for(two_workers):
    """The collected future has callbacks that Python does not know of: they run where the call is completed."""
    a, _ = two_workers

    def collect() -> int:
        future = rpc.rpc_async("worker1", identity, (1,))
        collected = torch.futures.collect_all([future])
        doubled = collected.then(lambda _: rpc.rpc_sync("worker1", identity, (2,)))
        return future.wait() + doubled.wait()

    assert a.run(collect) == 3


def test_threads_that_wait_for_one_worker_share_its_socket(two_workers):
    a, _ = two_workers

    def call(number: int) -> int:
        return sum(rpc.rpc_sync("worker1", identity, (number,)) for _ in range(50))

    def call_from_threads() -> list[int]:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            return list(pool.map(call, range(8)))

    assert a.run(call_from_threads) == [50 * number for number in range(8)]


def test_a_wait_ends_when_another_thread_completes_the_call(two_workers):
    a, b = two_workers

    def wait_and_cancel() -> None:
        future = rpc.rpc_async("worker1", wait_for, ("cancelled",))
        waits = threading.Event()
        timer = threading.Thread(target=lambda: (waits.wait(), future.cancel()))
        timer.start()
        waits.set()
        with pytest.raises(RpcCancelledError):
            future.wait_for_answer()
        timer.join()

    a.run(wait_and_cancel)
    b.run(set_event, "cancelled")
