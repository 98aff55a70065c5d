"""Threads look at a socket again and again for a moment before they sleep, but only once where more is in vain."""

import itertools
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gradwire import rpc
from gradwire.rpc.execution import poller
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.execution.poller import MAX_LOOK_S, MAX_SKIPPED, SocketWaiter, Spinner

from tests.remote_functions import identity


class Descriptor:
    """Becomes ready when it has been looked at for a number of times."""

    def __init__(self, ready_after: float) -> None:
        self.ready_after = ready_after
        self.looks = 0

    def poll(self, _timeout: int) -> list[tuple[int, int]]:
        self.looks += 1
        return [(1, select.POLLIN)] if self.looks > self.ready_after else []


@pytest.fixture
def clock(monkeypatch):
    """Has each look of a spinner take 10 µs."""
    times = itertools.count()
    monkeypatch.setattr(poller, "time", SimpleNamespace(monotonic=lambda: 1e-5 * next(times)))


def test_a_descriptor_that_becomes_ready_is_found():
    descriptor, spinner, found = Descriptor(ready_after=5), Spinner(60), []
    while not found:  # a look that is interrupted for long ends the wait
        found = spinner.spin(descriptor.poll)
    assert found == [(1, select.POLLIN)]
    assert descriptor.looks == 6


def test_a_thread_that_is_bound_to_one_processor_looks_as_often():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        test_a_descriptor_that_becomes_ready_is_found()
    finally:
        os.sched_setaffinity(0, allowed)


def test_looking_in_vain_becomes_rare_and_recovers(clock):
    never, at_once = Descriptor(float("inf")), Descriptor(0)
    spinner = Spinner(1e-3)

    def skipped() -> int:
        """Returns how many waits go by, with one look in each, until the spinner looks again and again."""
        for count in range(MAX_SKIPPED + 2):
            before = never.looks
            spinner.spin(never.poll)
            if never.looks > before + 1:
                return count
        raise AssertionError("the spinner never looks again and again")

    assert [skipped() for _ in range(9)] == [0, 1, 3, 7, 15, 31, 63, 64, 64]
    for _ in range(MAX_SKIPPED + 1):
        spinner.spin(at_once.poll)
    assert skipped() == 0


def test_a_thread_looks_once_if_it_is_switched_off():
    never = Descriptor(float("inf"))
    assert Spinner(0).spin(never.poll) == []
    assert never.looks == 1


def test_looking_stops_when_a_look_takes_long():
    descriptor = Descriptor(float("inf"))

    def poll(timeout: int) -> list[tuple[int, int]]:
        deadline = time.monotonic() + 2 * MAX_LOOK_S
        while time.monotonic() < deadline:
            pass
        return descriptor.poll(timeout)

    assert Spinner(60).spin(poll) == []
    assert descriptor.looks == 1


def test_looking_stops_for_other_work():
    descriptor = Descriptor(float("inf"))
    assert Spinner(60).spin(descriptor.poll, stop=lambda: True) == []
    assert descriptor.looks == 1


def test_others_get_the_processor_between_two_looks(monkeypatch):
    steps = []
    descriptor = Descriptor(ready_after=2)
    monkeypatch.setattr(os, "sched_yield", lambda: steps.append(f"yield after {descriptor.looks}"))
    while not Spinner(60).spin(descriptor.poll):  # a look that is interrupted for long ends the wait
        steps.clear()
        descriptor.looks = 0
    assert steps == ["yield after 1", "yield after 2"]


@pytest.mark.parametrize("busy_poll", [0.0, 60.0])
def test_a_waiter_waits_for_a_descriptor_or_another_thread(busy_poll):
    waiter = SocketWaiter(busy_poll)
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x")
        assert waiter.wait(reader)
        waiter.release()  # by the thread itself, which does not wait
        os.read(reader, 1)
        executor = Executor(1, "test-busy-poll")
        executor.submit(waiter.release)
        assert not waiter.wait(reader)
        assert executor.close(10)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("busy_poll", [0.0, 0.001])
def test_a_signal_handler_may_wait_by_the_waiter_that_it_interrupts(busy_poll):
    waiter = SocketWaiter(busy_poll)
    ours, theirs = socket.socketpair()
    events: list[tuple[str, bool]] = []

    def wait_too(*_: object) -> None:
        theirs.send(b"x")
        events.append(("handler", waiter.wait(ours.fileno())))

    before = signal.signal(signal.SIGUSR1, wait_too)
    interrupting = threading.Thread(target=interrupt_when_asleep, args=(threading.get_native_id(),))
    interrupting.start()
    try:
        with ours, theirs:
            events.append(("interrupted", waiter.wait(ours.fileno())))
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
    assert events == [("handler", True), ("interrupted", True)]


def interrupt_when_asleep(thread: int) -> None:
    """Sends a signal to this process when its thread with this id is waiting."""
    stat = Path(f"/proc/self/task/{thread}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        pass
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("busy_poll", [-1, 0.1, True, "0", None])
def test_other_times_are_refused(busy_poll):
    with pytest.raises(ValueError, match="busy_poll is"):
        rpc.RpcBackendOptions(busy_poll=busy_poll)


def test_calls_without_busy_polling(workers):
    a, _ = workers.rpc(2, busy_poll=0)
    for number in range(50):
        assert a.run(rpc.rpc_sync, "worker1", identity, (number,)) == number
