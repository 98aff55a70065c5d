"""The counts by which flow control decides, without workers."""

import contextlib
import random
import select
import socket
import struct
import threading
from collections.abc import Callable

import pytest
from gradwire import rpc
from gradwire.errors import SendQueueFullError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.execution.poller import READABLE
from gradwire.rpc.peers.flow_control import CALL_BYTES, FlowControl, Waiter, Window
from gradwire.rpc.peers.peer import ReceivedQueue
from gradwire.rpc.transports.envelope_socket import EnvelopeSocket, FrameReader

from tests.remote_functions import wait_until

WORKERS = [rpc.WorkerInfo(f"worker{number}", number) for number in range(3)]


class Model:
    """Random calls of three workers and four depths, as in a program whose threads wait."""

    def __init__(self, seed: int, options: rpc.FlowControlOptions) -> None:
        self.chance = random.Random(seed)
        self.options = options
        self.flow = FlowControl(options)
        self.windows = {worker: Window(worker) for worker in WORKERS}
        self.count = 0
        self.calls: dict[int, tuple[rpc.WorkerInfo, int, int]] = {}
        """Worker, depth and bytes of the calls that have been admitted, or wait, by id."""
        self.waiters: dict[int, Waiter] = {}

    def in_flight(self, worker: rpc.WorkerInfo | None = None) -> list[tuple[int, int]]:
        """Returns the depths and bytes of the calls that are admitted."""
        return [
            (depth, nbytes)
            for identifier, (callee, depth, nbytes) in self.calls.items()
            if worker in (None, callee) and not self.waits(identifier)
        ]

    def waits(self, identifier: int) -> bool:
        return identifier in self.waiters and not self.waiters[identifier].woken.done()

    def begin(self) -> None:
        worker, depth = self.chance.choice(WORKERS), self.chance.choice([0, 0, 0, 1, 2, 3])
        nbytes = self.chance.choice([10, 10, CALL_BYTES, 5 * CALL_BYTES, 30 * CALL_BYTES])
        self.count += 1
        alone = not any(other == depth for other, _ in self.in_flight(worker))
        queued = any(self.waits(i) for i, call in self.calls.items() if call[:2] == (worker, depth))
        with self.flow.nesting.at(depth):
            waiter = self.flow.admit(self.windows[worker], self.count, nbytes)
        self.calls[self.count] = worker, depth, nbytes
        if waiter is not None:
            self.waiters[self.count] = waiter
        assert not (alone and not queued and self.waits(self.count)), "the only call of its depth waits"
        if not self.waits(self.count) and not alone:
            self.assert_within_bounds(worker)

    def assert_within_bounds(self, worker: rpc.WorkerInfo) -> None:
        mine, everyones = self.in_flight(worker), self.in_flight()
        assert len(mine) <= self.options.max_in_flight
        assert len(everyones) <= self.options.max_total_in_flight
        assert sum(max(CALL_BYTES, n) for _, n in mine) <= self.options.max_in_flight_bytes
        assert sum(max(CALL_BYTES, n) for _, n in everyones) <= self.options.max_total_in_flight_bytes

    def end(self, identifier: int) -> None:
        worker, _, _ = self.calls.pop(identifier)
        waiter = self.waiters.pop(identifier, None)
        if waiter is not None and not waiter.woken.done():
            self.flow.abandon(self.windows[worker], identifier)  # it has timed out
        else:
            self.flow.release(self.windows[worker], identifier)

    def assert_nobody_waits_in_vain(self) -> None:
        """A call waits only while another one of its depth to the same worker is in flight."""
        for identifier, (worker, depth, _) in self.calls.items():
            if self.waits(identifier):
                assert depth in {other for other, _ in self.in_flight(worker)}

    def assert_figures(self) -> None:
        for worker in WORKERS:
            mine = self.in_flight(worker)
            expected = {
                "calls_in_flight": len(mine),
                "bytes_in_flight": sum(max(CALL_BYTES, nbytes) for _, nbytes in mine),
                "waiting_calls": sum(self.waits(i) for i, call in self.calls.items() if call[0] == worker),
            }
            assert self.flow.figures(self.windows[worker]) == expected


@pytest.mark.parametrize("seed", range(20))
def test_random_calls(seed):
    """Everything that is admitted is within the bounds, and everything that waits is admitted in the end."""
    chance = random.Random(seed)
    limit = chance.choice([1, 3, 10, 100])
    model = Model(
        seed,
        rpc.FlowControlOptions(
            max_in_flight=limit,
            max_in_flight_bytes=40 * CALL_BYTES,
            max_total_in_flight=chance.choice([limit, 2 * limit]),
            max_total_in_flight_bytes=chance.choice([40, 100]) * CALL_BYTES,
        ),
    )
    for _ in range(400):
        if model.calls and chance.random() < 0.45:
            model.end(chance.choice(list(model.calls)))
        else:
            model.begin()
        model.assert_nobody_waits_in_vain()
        model.assert_figures()
    if chance.random() < 0.5:
        lost = chance.choice(WORKERS)
        for identifier in [i for i, call in model.calls.items() if call[0] == lost]:
            if model.waits(identifier):
                model.end(identifier)
            else:
                model.calls.pop(identifier)
        model.flow.release_all(model.windows[lost])
        model.assert_nobody_waits_in_vain()
    while model.calls:
        model.end(next(identifier for identifier in model.calls if not model.waits(identifier)))
    model.assert_figures()


def test_calls_of_many_threads_are_counted_exactly():
    flow = FlowControl(rpc.FlowControlOptions(max_in_flight=200, max_total_in_flight=300))
    windows = [Window(worker) for worker in WORKERS]
    highest = [0] * 8

    def call(index: int) -> None:
        chance, window = random.Random(index), windows[index % 2]
        for number in range(2000):
            identifier = index * 10_000 + number
            nbytes = chance.choice([10, 10, 5000])
            if (waiter := flow.admit(window, identifier, nbytes)) is not None:
                waiter.woken.result(60)
            highest[index] = max(highest[index], flow.figures(window)["calls_in_flight"])
            flow.release(window, identifier)
            flow.release(window, identifier)  # a second answer changes nothing

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < max(highest) <= 4
    for window in windows:
        assert flow.figures(window) == {"calls_in_flight": 0, "bytes_in_flight": 0, "waiting_calls": 0}


def test_only_the_worker_that_was_called_can_release_a_call():
    flow = FlowControl(rpc.FlowControlOptions(max_in_flight=1, when_full="raise"))
    called, other = map(Window, WORKERS[:2])
    flow.admit(called, 1, 0)
    flow.release(other, 1)
    with pytest.raises(SendQueueFullError):
        flow.admit(called, 2, 0)
    flow.release(called, 1)
    assert flow.admit(called, 3, 0) is None


def test_calls_are_admitted_in_their_order():
    flow = FlowControl(rpc.FlowControlOptions(max_in_flight=2, max_in_flight_bytes=20 * CALL_BYTES))
    window = Window(WORKERS[0])
    assert flow.admit(window, 1, 15 * CALL_BYTES) is None
    large = flow.admit(window, 2, 15 * CALL_BYTES)
    small = flow.admit(window, 3, 1)  # there is capacity for it, but it would let the large one wait for ever
    assert large is not None
    assert small is not None
    assert not large.woken.done()
    assert not small.woken.done()
    flow.release(window, 1)
    assert large.woken.done()
    assert small.woken.done()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (rpc.FlowControlOptions(max_received=4), [10] * 20),
        (rpc.FlowControlOptions(max_received_bytes=10 * CALL_BYTES), [CALL_BYTES, 9 * CALL_BYTES, 100] * 5),
        (rpc.FlowControlOptions(max_received_bytes=CALL_BYTES), [100 * CALL_BYTES] * 3),
    ],
)
def test_reading_pauses_and_goes_on(options, sizes):
    queue, other = ReceivedQueue(options), ReceivedQueue(options)
    waiting: list[int] = []
    pauses = 0
    for nbytes in sizes:
        pause = queue.add(nbytes)
        waiting.append(nbytes)
        is_over = (
            len(waiting) > options.max_received
            or sum(max(CALL_BYTES, size) for size in waiting) > options.max_received_bytes
        )
        assert (pause is not None) == is_over
        assert queue.pause is pause
        assert other.add(1) is None
        other.begin()
        if pause is not None:
            pauses += 1
            while not pause.done():
                assert waiting, "everything has begun, and nothing is read"
                queue.begin()
                waiting.pop(0)
            assert len(waiting) <= options.max_received / 2
            assert queue.pause is None
    assert pauses
    assert queue.figures()["received_requests"] == len(waiting)


def frame(number: int, nbytes: int = 0) -> bytes:
    data = agent_pb2.Envelope(id=number, body=agent_pb2.Payload(inline=bytes(nbytes))).SerializeToString()
    return struct.pack("<IB", len(data), 0) + data


class Later:
    """A socket that is watched, and readable at once."""

    def __init__(self) -> None:
        self.was_seen = threading.Event()
        self._sockets = socket.socketpair()

    def set_ready(self, executor: Executor) -> None:
        self._sockets[1].send(b"x")
        executor.watch(self._sockets[0].fileno(), READABLE, self._on_readable)

    def _on_readable(self) -> bool:
        self.was_seen.set()
        return False

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def end_of_reading(end: EnvelopeSocket) -> Callable[[], bool]:
    return lambda: bool(end._paused)


@pytest.mark.parametrize("nbytes", [10, 500_000], ids=["small", "larger than a read"])
@pytest.mark.parametrize("closes", [False, True])
def test_a_socket_is_not_read_while_reading_pauses(nbytes, closes):
    executor = Executor(2, "test-pauses")
    mine, other = socket.socketpair()
    queue = ReceivedQueue(rpc.FlowControlOptions(max_received=1))
    seen: list[int] = []
    ended = threading.Event()
    later = Later()

    def on_envelope(envelope: agent_pb2.Envelope, size: int) -> object:
        assert 0 <= size - len(envelope.SerializeToString()) < 1000  # with what its parts take
        seen.append(envelope.id)
        return queue.add(size)

    end = EnvelopeSocket("unix", mine, executor, FrameReader(on_envelope), lambda _reason: ended.set())
    try:
        end.start()
        for number in (1, 2):
            other.sendall(frame(number, nbytes))
        wait_until(end_of_reading(end))
        assert seen == [1, 2]

        def send() -> None:
            with contextlib.suppress(BrokenPipeError):
                other.sendall(frame(3, nbytes) + frame(4))

        sender = threading.Thread(target=send)
        sender.start()
        wait_until(lambda: select.select([mine], [], [], 0)[0])
        later.set_ready(executor)  # epoll reports what is ready in its order
        assert later.was_seen.wait(20)
        assert seen == [1, 2]
        if closes:
            end.close()
            assert ended.wait(20)
        else:
            for _ in range(2):
                queue.begin()
            wait_until(lambda: seen == [1, 2, 3, 4])
        other.shutdown(socket.SHUT_RDWR)
        sender.join(20)
    finally:
        end.close()
        executor.close(10)
        end.release()
        other.close()
        later.close()
