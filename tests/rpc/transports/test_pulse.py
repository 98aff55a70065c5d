"""Workers of one host see each other's pulse, and send no heartbeats then."""

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest
from gradwire import rpc
from gradwire.rpc.channels.shared_memory import PeerSegments, SharedMemory
from gradwire.rpc.contracts.options import ChannelOptions, Liveness
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.envelope_socket import EnvelopeSocket, FrameReader, PulseExchange
from gradwire.rpc.transports.liveness import Heartbeats, Pulse
from gradwire.rpc.transports.socket_frames import HEADER, FrameKind

from tests.remote_functions import add, wait_until
from tests.rpc.channels.segments import network
from tests.rpc.peers import links
from tests.rpc.peers.links import LIVENESS
from tests.stopped import stopped

MIB = 1 << 20


class End:
    """One end of a unix socket between two workers."""

    def __init__(self, connection: socket.socket, executor: Executor) -> None:
        self.pulse = Pulse()
        self.exchange = PulseExchange(self.pulse)
        self.reasons: list[str] = []
        segments = PeerSegments(SharedMemory(None, None, ChannelOptions()))  # type: ignore[arg-type]
        reader = FrameReader(lambda *_: None, segments, self.exchange)
        self.socket = EnvelopeSocket("unix", connection, executor, reader, self.reasons.append)
        segments.connect(self.socket.writer)
        self.socket.start()

    def beat(self) -> bool:
        """Does what a tick of the heartbeats does; returns whether something was sent."""
        self.socket.take_sent()
        self.pulse.beat()
        self.socket.send_heartbeat()
        return self.socket.writer.has_sent

    def close(self) -> None:
        self.socket.close()
        self.socket.release()
        self.pulse.close()


@pytest.fixture
def ends(executor: Executor) -> Iterator[tuple[End, End]]:
    before = len(os.listdir("/proc/self/fd"))
    a, b = (End(each, executor) for each in socket.socketpair())
    yield a, b
    for end in a, b:
        end.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.fixture
def end(executor: Executor) -> Iterator[tuple[End, socket.socket]]:
    """One end, and the bare socket at the other end."""
    mine, other = socket.socketpair()
    made = End(mine, executor)
    yield made, other
    made.close()
    other.close()


def show(a: End, b: End) -> None:
    """Has both ends read each other's counter, and know that."""
    for _ in range(2):
        a.beat()
        b.beat()
        wait_until(lambda: b.exchange._descriptor >= 0 and a.exchange._descriptor >= 0)
    wait_until(lambda: a.exchange._is_read and b.exchange._is_read)


def test_nothing_is_sent_once_both_see_the_pulse_of_the_other(ends):
    a, b = ends
    show(a, b)
    assert not any(end.beat() for end in (a, b) for _ in range(5))
    assert not a.reasons
    assert not b.reasons


def test_a_pulse_counts_as_heard(ends):
    a, b = ends
    show(a, b)
    while a.socket.take_heard():
        pass
    assert not a.socket.take_heard()
    b.pulse.beat()
    assert a.socket.take_heard()
    assert not a.socket.take_heard()


def test_heartbeats_go_on_while_the_other_does_not_say_that_it_sees_the_pulse(end):
    mine, other = end
    for expected in (FrameKind.PULSE, FrameKind.HEARTBEAT, FrameKind.HEARTBEAT):
        mine.socket.send_heartbeat()
        data, descriptors, _, _ = socket.recv_fds(other, 100, 4)
        assert data == HEADER.pack(0, expected)
        for each in descriptors:
            os.close(each)


def test_they_do_without_descriptors(end, monkeypatch):
    mine, other = end

    def fail(*_: object) -> None:
        raise OSError("no descriptors are left")

    monkeypatch.setattr(os, "memfd_create", fail)
    for _ in range(3):
        mine.socket.send_heartbeat()
        assert other.recv(100) == HEADER.pack(0, FrameKind.HEARTBEAT)
    other.sendall(HEADER.pack(0, FrameKind.PULSE))  # the descriptor was lost on the way
    other.sendall(HEADER.pack(0, FrameKind.HEARTBEAT))
    wait_until(mine.socket.take_heard)
    assert mine.exchange.next_heartbeat() == HEADER.pack(0, FrameKind.HEARTBEAT)
    assert not mine.reasons


def test_a_counter_for_which_there_is_no_memory_is_none(monkeypatch):
    pulse = Pulse()

    def fail(*_: object) -> None:
        raise OSError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="no memory is left"):
            pulse.share()
        pulse.beat()
    os.close(pulse.share())
    pulse.close()


def test_the_other_cannot_write_into_the_counter():
    pulse = Pulse()
    descriptor = pulse.share()
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
    finally:
        os.close(descriptor)
        pulse.close()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (["file"], "a counter that is no memory, or cannot be read"),
        (["pipe"], "a counter that is no memory, or cannot be read"),
        (["unreadable"], "a counter that is no memory, or cannot be read"),
        (["memory", "memory"], "a second counter"),
        (["read"], "it reads a counter that it was not shown"),
    ],
)
def test_malformed_frames_cost_the_connection(end, frames, reason):
    mine, other = end
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as file:
        pipe = os.pipe()
        memory = os.memfd_create("test")
        unreadable = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY)
        descriptors = {"file": file.fileno(), "pipe": pipe[0], "memory": memory, "unreadable": unreadable}
        for each in frames:
            if each == "read":
                other.sendall(HEADER.pack(0, FrameKind.PULSE_READ))
            else:
                socket.send_fds(other, [HEADER.pack(0, FrameKind.PULSE)], [descriptors[each]])
        wait_until(lambda: mine.reasons)
        for each in (*pipe, memory, unreadable):
            os.close(each)
    assert mine.reasons == [f"it sent bytes that are no message: {reason}"]
    mine.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


class Watched:
    """A connection to a peer that sends nothing."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.beats = 0
        self.silent = asyncio.Event()

    def take_heard(self) -> bool:
        if self.error is not None:
            raise self.error
        return False

    def take_sent(self) -> bool:
        return False

    def send_heartbeat(self) -> None:
        self.beats += 1

    def sees_life(self, _seconds: float) -> bool:
        return False

    def on_silent(self, _seconds: float) -> None:
        self.silent.set()


def test_a_connection_that_fails_keeps_no_heartbeats_from_others(caplog):
    async def check() -> None:
        liveness = Liveness(heartbeat=0.1, suspect_after=0.4, lease=1)
        heartbeats = Heartbeats(asyncio.get_running_loop(), liveness, Pulse())
        failing, other = Watched(OSError("it cannot be read")), Watched()
        for each in (failing, other):
            heartbeats.add(each)
        await asyncio.wait_for(other.silent.wait(), 20)
        assert other.beats
        for each in (failing, other):
            heartbeats.remove(each)

    asyncio.run(check())
    assert "it cannot be read" in caplog.text


def test_a_worker_that_is_stopped_while_nothing_is_sent_is_suspect(workers):
    a, b = workers.rpc(2, transports=("unix", "grpc"), liveness=LIVENESS)

    def settle(peer: int) -> None:
        """Waits until neither worker sends heartbeats to the other."""
        links.record_events()
        assert rpc.rpc_sync(f"worker{peer}", add, (1, 1)) == 2
        pulses = network().peers.by_id[peer].transport.outbox.socket._pulses
        wait_until(lambda: pulses._is_read and pulses._has_confirmed)

    def watch() -> None:
        links.suspect_after(1.0)
        wait_until(lambda: links.seen == [("suspect", "worker1")])
        links.suspect_after(LIVENESS.suspect_after)

    settling = [a.start(settle, 1), b.start(settle, 0)]
    for each in settling:
        each.result()
    with stopped(b):
        a.run(watch)
    a.run(lambda: wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")]))
    assert a.run(rpc.rpc_sync, "worker1", add, (1, 1)) == 2
