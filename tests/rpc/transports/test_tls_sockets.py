"""A socket with TLS carries bytes as one without does, however they are split."""

import asyncio
import random
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import pytest
from gradwire.net.security import worker_host_name
from gradwire.rpc.channels.bulk_connections import PART_BYTES, SendingBundle
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.envelope_socket import READ_BYTES
from gradwire.rpc.transports.tls_socket import RECORD_BYTES, TlsSocket
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remote_functions import wait_until
from tests.rpc.channels import test_bulk_connections as bulk
from tests.rpc.transports.test_envelope_sockets import End, envelope, frame
from tests.rpc.transports.tls_pairs import identity_of, tls_pair


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor(4, "test-tls")
    yield made
    assert made.close(10)


@pytest.fixture
def ends(executor: Executor) -> Iterator[Callable[[], tuple[End, End]]]:
    """Makes both ends of a connection that carries envelopes."""
    made: list[End] = []

    def make() -> tuple[End, End]:
        here, there = (End(each, executor) for each in tls_pair())
        made.extend([here, there])
        for end in (here, there):
            end.socket.start()
        return here, there

    yield make
    for end in made:
        end.socket.close()
    for end in made:
        assert end.ended.wait(20)
        end.socket.release()


def ciphertext(end: TlsSocket, data: bytes, sizes: Iterator[int]) -> bytes:
    """Returns what an end would send, if it were given the data in pieces of these sizes."""
    sent = []
    while data:
        size = min(next(sizes, len(data)), len(data))
        end._write(data[:size])
        sent.append(end._outgoing.read())
        data = data[size:]
    return b"".join(sent)


def accepted_from(connect: Callable[[], None], ours: socket.socket) -> TlsSocket:
    """Accepts a connection that another thread makes in this function."""
    accepted = TlsSocket(ours, identity_of("a").server_context(), None)
    connecting = threading.Thread(target=connect)
    connecting.start()

    async def handshake() -> None:
        await asyncio.wait_for(accepted.handshake(asyncio.get_running_loop()), 20)

    asyncio.run(handshake())
    connecting.join(20)
    return accepted


@pytest.mark.parametrize("sent", [b"", b"abc"], ids=["nothing before", "something before"])
@pytest.mark.parametrize("more", [b"", b"x" * 10], ids=["nothing after", "something after"])
@pytest.mark.parametrize("into", [False, True], ids=["recv", "recv_into"])
def test_nothing_is_read_after_the_closure_alert(sent, more, into):
    """The thread that read did not end, and held the lock."""
    ours, theirs = socket.socketpair()
    name = worker_host_name("a")
    context = identity_of("b").client_context()
    made: list[ssl.SSLSocket] = []
    accepted = accepted_from(lambda: made.append(context.wrap_socket(theirs, server_hostname=name)), ours)
    made[0].sendall(sent)
    made[0].settimeout(0)
    with pytest.raises(ssl.SSLWantReadError):
        made[0].unwrap()  # sends the alert, and does not wait for the answer
    with socket.socket(fileno=made[0].detach()) as bare:
        bare.sendall(more)
        received = bytearray()
        for _ in range(3):
            buffer = bytearray(100)
            got = buffer[: accepted.recv_into(buffer)] if into else accepted.recv()
            received += got
        assert received == sent
        assert not got
        assert accepted.has_unread()  # so that whoever has read into a buffer sees the end
    accepted.close()


@given(
    sizes=st.lists(st.integers(0, 300) | st.just(3 * RECORD_BYTES), min_size=1, max_size=12),
    records=st.lists(st.integers(1, 400), max_size=30),
    cuts=st.lists(st.integers(1, 400), max_size=30),
)
def test_frames_arrive_however_they_and_their_records_are_split(sizes, records, cuts):
    executor = Executor(2, "test-split")
    mine, other = socket.socketpair()
    receiver, sender = tls_pair(mine, other)
    try:
        end = End(receiver, executor)
        sent = [envelope(number, size) for number, size in enumerate(sizes, 1)]
        data = ciphertext(sender, b"".join(map(frame, sent)), iter(records))
        for cut in cuts:
            other.sendall(data[:cut])
            end.socket.on_readable()  # reads what is there, as the executor's thread does
            data = data[cut:]
        other.settimeout(20)
        end.socket.start()
        other.sendall(data)
        assert end.take(len(sent)) == sent
    finally:
        end.socket.close()
        executor.close(10)
        end.socket.release()
        other.close()


@given(
    sizes=st.lists(st.integers(1, 3000) | st.just(PART_BYTES + 5), min_size=1, max_size=5),
    records=st.lists(st.integers(1, 40_000), max_size=30),
    cuts=st.lists(st.integers(1, 40_000), max_size=20),
    late=st.booleans(),
    unwanted=st.sets(st.integers(0, 4)),
)
@settings(max_examples=40)
def test_payloads_arrive_however_they_and_their_records_are_split(sizes, records, cuts, late, unwanted):
    executor = Executor(2, "test-split")
    mine, other = socket.socketpair()
    receiver, sender = tls_pair(mine, other)
    other.settimeout(20)
    end = bulk.End(executor)
    try:
        payloads = [bulk.some_bytes(size, number) for number, size in enumerate(sizes)]
        parts = [
            bulk.part(number, index, data)
            for number, data in enumerate(payloads)
            for index in reversed(range(bulk.count_parts(len(data))))
        ]
        stream = ciphertext(sender, b"".join(parts), iter(records))
        expected = {}

        def announce() -> None:
            for number, data in enumerate(payloads):
                if number in unwanted:
                    end.bundle.discard(number, len(data))
                else:
                    expected[number] = end.bundle.expect(number, len(data))

        def send() -> None:
            rest = memoryview(stream)
            for cut in cuts:
                other.sendall(rest[:cut])
                rest = rest[cut:]
            other.sendall(rest)

        end.bundle.add(receiver)
        if not late:
            announce()
        thread = threading.Thread(target=send)
        thread.start()
        if late:
            wait_until(lambda: end.bundle._waiting)
            announce()
        for number, future in expected.items():
            assert future.result(20) == payloads[number]
        thread.join()
    finally:
        end.bundle.fail(ConnectionError("over"))
        executor.close(10)
        other.close()


@pytest.mark.parametrize("size", [1, RECORD_BYTES, READ_BYTES - 100, READ_BYTES, 5 << 20])
def test_envelopes_of_all_sizes_in_both_directions_at_once(ends, size):
    here, there = ends()
    sent = [envelope(number, size + number) for number in range(1, 6)]
    for message in sent:
        here.socket.writer.send(message.SerializeToString())
        there.socket.writer.send(message.SerializeToString())
    assert here.take(5) == sent
    assert there.take(5) == sent
    for end in (here, there):
        end.socket.finish()
    for end in (here, there):
        assert end.ended.wait(20)
        assert end.reasons == [""]


def test_senders_on_many_threads_and_in_both_directions(ends):
    pair = ends()

    def send(end: End, first: int) -> None:
        for number in range(first, first + 200):
            end.socket.writer.send(envelope(number, number % 3000).SerializeToString())

    threads = [threading.Thread(target=send, args=(end, 1000 * index)) for index in range(1, 4) for end in pair]
    for thread in threads:
        thread.start()
    for end in pair:
        received = [each.id for each in end.take(600)]
        for first in (1000, 2000, 3000):
            assert [each for each in received if first <= each < first + 1000] == [*range(first, first + 200)]
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("connections", [1, 3])
def test_payloads_of_all_sizes(executor, connections):
    pairs = [tls_pair() for _ in range(connections)]
    end = bulk.End(executor)
    for receiver, _ in pairs:
        end.bundle.add(receiver)
    sending = SendingBundle(1, [sender for _, sender in pairs], executor, lambda _: None)
    sending.start()
    payloads = {number: bulk.some_bytes(nbytes, number) for number, nbytes in enumerate(bulk.SIZES * 2, 1)}
    futures = {number: end.bundle.expect(number, len(data)) for number, data in payloads.items()}
    for number, data in payloads.items():
        sending.put(number, memoryview(data))
    for number, future in futures.items():
        assert future.result(20) == payloads[number]
    sending.end("the test is over")
    assert end.ended.wait(20)


def test_a_send_that_is_not_complete_is_called_again_and_sends_once():
    receiver, sender = tls_pair()
    data = random.Random(0).randbytes(10 * RECORD_BYTES + 1)
    received, calls = b"", 0
    rest = memoryview(data)
    while len(received) < len(data):
        try:
            while rest:
                calls += 1
                rest = rest[sender.send(rest) :]
        except BlockingIOError:
            pass
        select.select([receiver], [], [], 20)
        received += receiver.recv()
    assert received == data
    with pytest.raises(BlockingIOError):
        receiver.recv()
    for end in (receiver, sender):
        end.close()
