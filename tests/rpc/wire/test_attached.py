"""Bytes that follow an envelope on its socket arrive whole, however they are split and whoever reads them."""

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.options import MAX_ATTACHED_BYTES
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.execution.futures import Future
from gradwire.rpc.transports.envelope_socket import READ_BYTES, EnvelopeSocket, FrameReader
from gradwire.rpc.transports.outbox import Outbox
from gradwire.rpc.transports.socket_frames import HEADER, MAX_ATTACHING_BYTES, FrameKind
from gradwire.rpc.wire.parsing import embed, find_misplaced, read_attached
from hypothesis import given
from hypothesis import strategies as st

from tests.remote_functions import identity, wait_until
from tests.rpc.channels.segments import channels_to, network

MIB = 1 << 20
TCP = ("tcp", "grpc")

Received = tuple[Any, ...]
Allocate = Callable[[int], memoryview]


def _allocate(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


class End:
    """One end of a connection, which gets all that arrives; a thread may wait for the envelope `answer`."""

    def __init__(
        self, connection: socket.socket, executor: Executor, answer: int = -1, allocate: Allocate = _allocate
    ) -> None:
        self.received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self.completed: list[Received] = []
        self.reasons: list[str] = []
        self.answer = answer
        self.future: Future[None] = Future(executor)
        reader = FrameReader(self.on_envelope, allocate=allocate)
        self.socket = EnvelopeSocket("tcp", connection, executor, reader, self.reasons.append)

    def on_envelope(self, envelope: agent_pb2.Envelope, nbytes: int, *attached: memoryview) -> None:
        if envelope.id == self.answer:
            self.completed.append((envelope, *attached))
            self.future.set_result(None)
        else:
            self.received.put((envelope, nbytes, *attached))

    def take(self) -> tuple[int, bytes]:
        envelope, _, *attached = self.received.get(timeout=20)
        return envelope.id, bytes(attached[0]) if attached else envelope.attached


@pytest.fixture
def pair(executor: Executor) -> Iterator[Callable[..., tuple[End, socket.socket]]]:
    """Makes an end, and the bare socket at the other end."""
    made: list[tuple[End, socket.socket]] = []

    def make(answer: int = -1, allocate: Allocate = _allocate) -> tuple[End, socket.socket]:
        mine, other = socket.socketpair()
        made.append((End(mine, executor, answer, allocate), other))
        return made[-1]

    yield make
    for end, other in made:
        end.socket.close()
        end.socket.release()
        other.close()


@contextlib.contextmanager
def waiting(end: End, executor: Executor) -> Iterator[None]:
    """Has a thread wait for the answer inside of the block, and until it is there."""
    waiter = executor.poller.waiter
    assert waiter is not None
    thread = threading.Thread(target=executor.poller.read_here, args=(end.socket, waiter, end.future))
    thread.start()
    wait_until(end.socket.reading.locked)
    yield
    thread.join(20)
    assert not thread.is_alive()


def frames(identifier: int, *attached: bytes) -> bytes:
    """Returns what is sent for an envelope that these bytes follow."""
    nbytes = sum(map(len, attached))
    envelope = agent_pb2.Envelope(id=identifier, attached_nbytes=nbytes).SerializeToString()
    kind = FrameKind.ATTACHED if nbytes else FrameKind.ENVELOPE
    return HEADER.pack(len(envelope), kind) + envelope + b"".join(attached)


def content(nbytes: int) -> bytes:
    return bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)


@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 1000, READ_BYTES, READ_BYTES + 7]), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 4 * READ_BYTES), max_size=6),
)
def test_they_arrive_however_they_are_split(sizes, cuts):
    executor = Executor(2, "test-attached")
    mine, other = socket.socketpair()
    end = End(mine, executor)
    end.socket.start()
    sent = b"".join(frames(number, content(size)) for number, size in enumerate(sizes))
    positions = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    try:
        for begin, after in itertools.pairwise(positions):
            other.sendall(sent[begin:after])
        assert [end.take() for _ in sizes] == [(number, content(size)) for number, size in enumerate(sizes)]
    finally:
        end.socket.close()
        end.socket.release()
        other.close()
        executor.close(10)


@pytest.mark.parametrize("nbytes", [10, READ_BYTES, 3 * MIB])
def test_what_is_sent_is_what_arrives(executor, nbytes):
    mine, other = socket.socketpair()
    sender, receiver = End(mine, executor), End(other, executor)
    receiver.socket.start()
    data = content(nbytes)
    try:
        for number in range(5):
            envelope = agent_pb2.Envelope(id=number, attached_nbytes=nbytes + 1).SerializeToString()
            sender.socket.writer.send(envelope, [memoryview(data), memoryview(b"!")])
            sender.socket.writer.send(agent_pb2.Envelope(id=100 + number).SerializeToString())
        for number in range(5):
            assert receiver.take() == (number, data + b"!")
            assert receiver.take() == (100 + number, b"")
        wait_until(lambda: sender.socket.writer.queued_bytes == 0)
    finally:
        for end in (sender, receiver):
            end.socket.close()
            end.socket.release()


def test_queued_bytes_count_what_follows(executor):
    mine, other = socket.socketpair()
    sender = End(mine, executor)
    try:
        envelope = agent_pb2.Envelope(id=1, attached_nbytes=8 * MIB).SerializeToString()
        sender.socket.writer.send(envelope, [memoryview(bytes(8 * MIB))])
        assert sender.socket.writer.queued_bytes > 8 * MIB
    finally:
        sender.socket.close()
        sender.socket.release()
        other.close()


def test_a_large_envelope_has_them_inside(executor):
    mine, other = socket.socketpair()
    sender, receiver = End(mine, executor), End(other, executor)
    receiver.socket.start()
    try:
        body = agent_pb2.Payload(inline=bytes(MAX_ATTACHING_BYTES))
        envelope = agent_pb2.Envelope(id=3, body=body, attached_nbytes=5).SerializeToString()
        sender.socket.writer.send(envelope, [memoryview(b"hello")])
        assert receiver.take() == (3, b"hello")
    finally:
        for end in (sender, receiver):
            end.socket.close()
            end.socket.release()


@pytest.mark.parametrize("nbytes", [0, MAX_ATTACHED_BYTES + 1, 2**64 - 1])
def test_a_malformed_size_costs_the_connection(pair, nbytes):
    end, other = pair()
    end.socket.start()
    envelope = agent_pb2.Envelope(attached_nbytes=nbytes).SerializeToString()
    other.sendall(HEADER.pack(len(envelope), FrameKind.ATTACHED) + envelope)
    wait_until(lambda: end.reasons)
    assert end.reasons == [f"it sent bytes that are no message: {nbytes} bytes that are attached to an envelope"]


@pytest.mark.parametrize("first", [READ_BYTES // 2, 2 * MIB])
def test_a_waiting_thread_reads_its_answer(pair, executor, first):
    end, other = pair(answer=7)
    end.socket.start()
    data = content(2 * MIB)
    sent = frames(1) + frames(7, data)
    with waiting(end, executor):
        other.sendall(sent[:first])
        other.sendall(sent[first:])
    ((envelope, attached),) = end.completed
    assert (envelope.id, bytes(attached)) == (7, data)
    assert end.take() == (1, b"")


def test_what_a_waiting_thread_reads_counts_as_heard(pair, executor):
    end, other = pair(answer=7)
    end.socket.start()
    sent = frames(7, content(MIB))
    with waiting(end, executor):
        other.sendall(sent[:1000])
        for begin in range(1000, len(sent), 100_000):
            end.socket.has_heard = False  # not by `take_heard`, which also looks for what nobody has read yet
            other.sendall(sent[begin : begin + 100_000])
            wait_until(lambda: end.socket.has_heard)
    ((_, attached),) = end.completed
    assert bytes(attached) == content(MIB)


def test_what_interrupts_a_thread_that_reads_cannot_wait(pair, executor):
    """Such as the handler of a signal, or a finalizer: it would wait for what the thread is reading."""
    errors: list[RpcError] = []

    def allocate(nbytes: int) -> memoryview:
        with pytest.raises(RpcError, match="cannot wait for other workers") as caught:
            executor.poller.stop_reading_here()
        errors.append(caught.value)
        return memoryview(bytearray(nbytes))

    end, other = pair(answer=7, allocate=allocate)
    end.socket.start()
    with waiting(end, executor):
        other.sendall(frames(7, content(MIB)))
    assert len(errors) == 1
    assert len(end.completed) == 1


def payload(offset: int, nbytes: int) -> agent_pb2.Payload:
    return agent_pb2.Payload(attached=agent_pb2.AttachedPayload(offset=offset, nbytes=nbytes))


def test_payloads_are_read_from_them():
    for attached in (b"12345678", memoryview(b"12345678")):
        assert bytes(read_attached(attached, payload(2, 6))) == b"345678"
        assert read_attached(attached, agent_pb2.Payload(inline=b"x")) == b"x"


@pytest.mark.parametrize(
    "places",
    [
        [(0, 101)],
        [(128, 100)],
        [(0, 0)],
        [(8, 8)],
        [(0, 65), (64, 8)],
        [(64, 8), (0, 65)],
        [(0, 8), (0, 8)],
        [(2**64 - 64, 2**64 - 1)],
    ],
)
def test_payloads_that_are_not_in_them_or_overlap_are_refused(places):
    refused = find_misplaced([payload(*place) for place in places], 100, 1000)
    assert "100 attached ones is refused: max_payload_bytes is 1000" in refused


def test_payloads_of_a_size_that_is_not_accepted_are_refused():
    assert find_misplaced([payload(0, 60), agent_pb2.Payload(inline=b"x"), payload(64, 36)], 100, 60) == ""
    assert "60 bytes at 0 of 100 attached ones is refused" in find_misplaced([payload(0, 60)], 100, 59)


def connect() -> None:
    """Connects this worker to worker1 by a socket, where payloads can follow their messages."""
    rpc.rpc_sync("worker1", identity, (1,))
    assert network().peers.by_id[1].transport.name == "tcp"


def test_a_message_with_a_payload_that_is_not_accepted_is_refused(workers):
    a, _ = workers.rpc(2, transports=TCP, channels=rpc.ChannelOptions(max_payload_bytes=300_000))

    def send() -> None:
        connect()
        with pytest.raises(ValueError, match="max_payload_bytes is 300000"):
            rpc.rpc_sync("worker1", len, (torch.zeros(100_000),))
        assert rpc.rpc_sync("worker1", len, (torch.zeros(50_000),)) == 50_000

    a.run(send)


def test_gaps_count(workers):
    channels = rpc.ChannelOptions(max_attached_bytes=MAX_ATTACHED_BYTES)
    a, _ = workers.rpc(2, transports=TCP, channels=channels)

    def send() -> None:
        connect()
        half = MAX_ATTACHED_BYTES // 2
        sent = [torch.zeros(size, dtype=torch.uint8) for size in (half - 1, half + 1)]
        assert [len(each) for each in rpc.rpc_sync("worker1", identity, (sent,))] == [half - 1, half + 1]
        assert network().peers.by_id[1].transport.name == "tcp"

    a.run(send)


def test_they_count_as_inline(workers):
    a, b = workers.rpc(2, transports=TCP)
    a.run(connect)
    a.run(lambda: rpc.rpc_sync("worker1", len, (torch.zeros(50_000),)))

    assert a.run(lambda: str(rpc.debug_info()["traffic"])).count("attached") == 0
    assert b.run(lambda: str(rpc.debug_info()["traffic"])).count("attached") == 0


def test_they_become_a_field_where_there_is_no_socket():
    envelope = agent_pb2.Envelope(id=5, attached_nbytes=6).SerializeToString()
    parsed = agent_pb2.Envelope.FromString(embed(envelope, [memoryview(b"abc"), memoryview(b"def")]))
    assert (parsed.id, parsed.attached) == (5, b"abcdef")
    assert embed(envelope, []) == envelope


def test_they_do_while_an_envelope_waits_for_a_connection():
    peer: Any = SimpleNamespace(info=None, handshake=None)
    outbox = Outbox(peer, peer, "127.0.0.1:1", lambda: None, lambda *_: None)
    envelope = agent_pb2.Envelope(id=5, attached_nbytes=3).SerializeToString()
    outbox.put(envelope, [memoryview(b"abc")])
    (queued,) = agent_pb2.Frame.FromString(outbox.next_frame()).envelopes
    assert (queued.id, queued.attached) == (5, b"abc")


def test_they_arrive_by_grpc_if_the_socket_has_gone(workers):
    a, _ = workers.rpc(2, transports=("grpc",))

    def send() -> None:
        type(network().peers.by_id[1]).has_socket = True  # which it had when the message was made
        sent = [torch.rand(40_000), torch.arange(50_000)]
        for got, tensor in zip(rpc.rpc_sync("worker1", identity, (sent,)), sent, strict=True):
            assert torch.equal(got, tensor)
            got.add_(1)

    a.run(send)


def test_tensors_follow_their_message_and_larger_ones_do_not(workers):
    a, _ = workers.rpc(2, transports=TCP)

    def send() -> None:
        connect()
        odd = torch.arange(50_001, dtype=torch.float64)[1:]
        sent = [
            torch.arange(40_000, dtype=torch.float32),
            odd,
            torch.arange(64_000, dtype=torch.int32).view(160, 400).t(),
            torch.rand(3),
        ]
        for _ in range(3):
            for got, tensor in zip(rpc.rpc_sync("worker1", identity, (sent,)), sent, strict=True):
                assert torch.equal(got, tensor)
                assert got.data_ptr() % 64 == 0 or got.numel() < 1000
                got.add_(1)  # it is an ordinary tensor
        assert not channels_to(1).bulk.is_connected
        large = torch.rand(MIB)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (large,)), large)
        wait_until(lambda: channels_to(1).bulk.is_connected)

    a.run(send)


def test_the_option_sends_them_apart(workers):
    options = rpc.ChannelOptions(max_attached_bytes=200_000)
    a, _ = workers.rpc(2, transports=TCP, channels=options)

    def send(count: int) -> bool:
        tensor = torch.rand(count)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (tensor,)), tensor)
        return channels_to(1).bulk.is_connected

    a.run(connect)
    assert not a.run(send, 50_000)
    a.run(send, 50_001)
    a.run(lambda: wait_until(lambda: channels_to(1).bulk.is_connected))


def test_more_than_they_may_be_is_an_error():
    with pytest.raises(ValueError, match=f"give at most {MAX_ATTACHED_BYTES}"):
        rpc.ChannelOptions(max_attached_bytes=MAX_ATTACHED_BYTES + 1)
