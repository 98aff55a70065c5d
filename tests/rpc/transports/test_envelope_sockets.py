"""Sockets carry envelopes in order, however their bytes are split, and never make a sender wait."""

import concurrent.futures
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.envelope_socket import READ_BYTES, EnvelopeSocket, FrameReader
from gradwire.rpc.transports.socket_frames import MAX_ATTACHING_BYTES, MAX_SIDE_FRAME_BYTES, FrameKind
from hypothesis import given
from hypothesis import strategies as st


class End:
    """One end of a connection: what it has received, and how it ended."""

    def __init__(self, connection: socket.socket, executor: Executor) -> None:
        self.received: queue.SimpleQueue[agent_pb2.Envelope] = queue.SimpleQueue()
        self.reasons: list[str] = []
        self.ended = threading.Event()
        self.socket = EnvelopeSocket("unix", connection, executor, FrameReader(self.received.put), self.end)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()

    def take(self, count: int) -> list[agent_pb2.Envelope]:
        return [self.received.get(timeout=20) for _ in range(count)]


@pytest.fixture
def pair(executor: Executor) -> Iterator[Callable[[], tuple[End, socket.socket]]]:
    """Makes an end that is read, and the bare socket at the other end."""
    made: list[tuple[End, socket.socket]] = []

    def make() -> tuple[End, socket.socket]:
        mine, other = socket.socketpair()
        end = End(mine, executor)
        end.socket.start()
        made.append((end, other))
        return end, other

    yield make
    for end, other in made:
        end.socket.close()
        end.socket.release()
        other.close()


def envelope(number: int, size: int = 0) -> agent_pb2.Envelope:
    return agent_pb2.Envelope(id=number, body=agent_pb2.Payload(inline=bytes(size)))


def frame(message: agent_pb2.Envelope) -> bytes:
    data = message.SerializeToString()
    return struct.pack("<IB", len(data), 0) + data


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12), cuts=st.lists(st.integers(1, 400), max_size=30)
)
def test_frames_arrive_however_they_are_split(sizes, cuts):
    executor = Executor(2, "test-split")
    mine, other = socket.socketpair()
    try:
        end = End(mine, executor)
        sent = [envelope(number, size) for number, size in enumerate(sizes, 1)]
        data = b"".join(map(frame, sent))
        for cut in cuts:
            other.sendall(data[:cut])
            end.socket.on_readable()  # reads what is there, as the executor's thread does
            data = data[cut:]
        other.sendall(data)
        end.socket.start()
        assert end.take(len(sent)) == sent
    finally:
        end.socket.close()
        executor.close(10)
        end.socket.release()
        other.close()


class WatchedLock:
    """A lock that counts how often a thread has tried to acquire it."""

    def __init__(self) -> None:
        self.tries = 0
        self.tried = threading.Condition()
        self.lock = threading.Lock()
        self.release = self.lock.release

    def acquire(self, blocking: bool = True) -> bool:
        acquired = self.lock.acquire(blocking)
        with self.tried:
            self.tries += 1
            self.tried.notify_all()
        return acquired


class ShortPause(concurrent.futures.Future[None]):
    """A pause that has ended by the time that it is waited for, and another thread has noticed."""

    def __init__(self, lock: WatchedLock, *, is_noticed: bool) -> None:
        super().__init__()
        self.lock = lock
        self.is_noticed = is_noticed

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[None]], object]) -> None:
        with self.lock.tried:
            tries = self.lock.tries
            fn(self)
            assert not self.is_noticed or self.lock.tried.wait_for(lambda: self.lock.tries > tries, 20)


def test_a_pause_that_ends_at_once(executor):
    mine, other = socket.socketpair()
    received: queue.SimpleQueue[int] = queue.SimpleQueue()
    lock = WatchedLock()

    def on_envelope(message: agent_pb2.Envelope, _: int) -> ShortPause:
        received.put(message.id)
        has_next = message.id < 4  # else there is nothing that another thread could notice
        if has_next:
            other.sendall(frame(envelope(message.id + 1)))
        return ShortPause(lock, is_noticed=has_next)

    end = EnvelopeSocket("unix", mine, executor, FrameReader(on_envelope), lambda _reason: None)
    end.reading = lock
    both = threading.Barrier(3)
    for _ in range(2):  # so that both threads are there
        executor.submit(both.wait)
    both.wait(20)
    end.start()
    other.sendall(frame(envelope(1)))
    try:
        assert [received.get(timeout=20) for _ in range(4)] == [1, 2, 3, 4]
    finally:
        end.close()
        other.close()
        assert executor.close(10)
        end.release()


@pytest.mark.parametrize("size", [1, READ_BYTES - 100, READ_BYTES, 5 << 20])
def test_envelopes_of_all_sizes(executor, size):
    mine, theirs = socket.socketpair()
    here, there = End(mine, executor), End(theirs, executor)
    here.socket.start()
    there.socket.start()
    sent = [envelope(number, size) for number in range(1, 6)]
    for message in sent:
        here.socket.writer.send(message.SerializeToString())
    assert there.take(5) == sent
    for end in (here, there):
        end.socket.finish()
    for end in (here, there):
        assert end.ended.wait(20)
        assert end.reasons == [""]
        end.socket.close()


def test_nobody_waits_for_a_peer_that_does_not_read(pair):
    end, other = pair()
    sent = [envelope(number, 100_000) for number in range(1, 101)]
    for message in sent:
        end.socket.writer.send(message.SerializeToString())  # 10 MB, of which the socket takes a fiftieth
    reader = other.makefile("rb")
    for message in sent:
        length, _ = struct.unpack("<IB", reader.read(5))
        assert agent_pb2.Envelope.FromString(reader.read(length)) == message


def test_senders_on_many_threads_do_not_mix_their_frames(executor):
    mine, theirs = socket.socketpair()
    here, there = End(mine, executor), End(theirs, executor)
    there.socket.start()

    def send(first: int) -> None:
        for number in range(first, first + 200):
            here.socket.writer.send(envelope(number, number % 3000).SerializeToString())

    threads = [threading.Thread(target=send, args=(1000 * index,)) for index in range(1, 6)]
    for thread in threads:
        thread.start()
    received = there.take(1000)
    for thread in threads:
        thread.join()
    for first in range(1000, 6000, 1000):
        mine_in_order = [each.id for each in received if first <= each.id < first + 1000]
        assert mine_in_order == list(range(first, first + 200))
    for end in (here, there):
        end.socket.close()
        end.socket.release()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "closed without a goodbye"),
        (b"\x05\x00", "closed without a goodbye"),
        (struct.pack("<IB", 3, 0) + b"\xff\xff\xff", "no message"),
        (struct.pack("<IB", 1 << 31, 0), "a frame of 2147483648 bytes"),
        (struct.pack("<IBQQ", 16, 2, 1, 65536), "a frame of kind 2"),
        (struct.pack("<IB", 0, 10), "a frame of kind 10"),
    ],
    ids=["nothing", "a part of a frame", "no envelope", "an announcement of 2 GiB", "a segment", "kind 10"],
)
def test_a_connection_that_ends_badly_says_how(pair, data, reason):
    end, other = pair()
    other.sendall(data)
    if "goodbye" in reason:
        other.shutdown(socket.SHUT_RDWR)
    assert end.ended.wait(20)
    assert len(end.reasons) == 1
    assert reason in end.reasons[0]
    with pytest.raises(BrokenPipeError):
        end.socket.writer.send(b"more")


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        (FrameKind.ATTACHED, MAX_ATTACHING_BYTES),
        (FrameKind.RELEASED, MAX_SIDE_FRAME_BYTES),
        (FrameKind.SPENT, MAX_SIDE_FRAME_BYTES),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_frames_are_bounded_however_they_arrive(kind, limit, is_whole):
    reader = FrameReader(lambda *_: pytest.fail("it was handled"))
    with pytest.raises(ValueError, match=f"a frame of {limit + 8} bytes"):
        reader.take(struct.pack("<IB", limit + 8, kind) + bytes(limit + 8 if is_whole else 8))


def test_what_was_sent_before_the_end_arrives(pair):
    end, other = pair()
    other.sendall(frame(envelope(1)) + frame(envelope(2)) + struct.pack("<IB", 0, 1))
    assert end.ended.wait(20)
    assert [each.id for each in end.take(2)] == [1, 2]
    assert end.reasons == [""]
    end.socket.writer.send(envelope(3).SerializeToString())  # the peer may still read
    assert other.recv(1000) == frame(envelope(3))
