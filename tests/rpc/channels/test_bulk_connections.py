"""Bulk connections bring payloads into their memory however the bytes are split, and trust no header."""

import asyncio
import concurrent.futures
import gc
import itertools
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire import rpc
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels import bulk
from gradwire.rpc.channels.base import PayloadLostError
from gradwire.rpc.channels.buffers import MIN_BLOCK_BYTES, BufferCache
from gradwire.rpc.channels.bulk_connections import (
    HEADER_BYTES,
    PART_BYTES,
    ReceivingBundle,
    SendingBundle,
    count_parts,
    pack_header,
    range_of_part,
    unpack_header,
)
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.sockets import UNIX, BulkSockets, SocketListener
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.remote_functions import identity, wait_until

SIZES = [1, 1000, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES + 17]


class End:
    """The receiving end of a bundle, and how it ended."""

    def __init__(self, executor: Executor) -> None:
        self.ended = threading.Event()
        self.bundle = ReceivingBundle(executor, lambda nbytes: memoryview(bytearray(nbytes)), self.ended.set)


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor(4, "test-bulk")
    yield made
    assert made.close(10)


@pytest.fixture
def receiving(executor: Executor) -> Iterator[Callable[[], tuple[End, socket.socket]]]:
    """Makes a receiving end, and the bare socket at the other end of its only connection."""
    made: list[tuple[End, socket.socket]] = []

    def make() -> tuple[End, socket.socket]:
        mine, other = socket.socketpair()
        end = End(executor)
        end.bundle.add(mine)
        made.append((end, other))
        return end, other

    yield make
    for end, other in made:
        end.bundle.fail(ConnectionError("the test is over"))
        other.close()


@pytest.fixture
def bundle(executor: Executor) -> Iterator[Callable[[int], tuple[SendingBundle, End]]]:
    """Makes both ends of a bundle with some connections."""
    made: list[tuple[SendingBundle, End]] = []

    def make(count: int) -> tuple[SendingBundle, End]:
        pairs = [socket.socketpair() for _ in range(count)]
        end = End(executor)
        for _, theirs in pairs:
            end.bundle.add(theirs)
        sending = SendingBundle(1, [mine for mine, _ in pairs], executor, lambda _: None)
        sending.start()
        made.append((sending, end))
        return sending, end

    yield make
    for sending, end in made:
        sending.end("the test is over")
        assert end.ended.wait(20)


def some_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def part(transfer_id: int, number: int, data: bytes) -> bytes:
    start, end = range_of_part(number, len(data))
    return pack_header(transfer_id, number) + data[start:end]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_headers_round_trip(transfer_id, number):
    assert unpack_header(pack_header(transfer_id, number)) == (transfer_id, number)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_refused(data):
    if data[:4] == b"part":
        assert pack_header(*unpack_header(data)) == data
    else:
        with pytest.raises(ValueError, match="header of a part begins with"):
            unpack_header(data)


@given(st.integers(1, 1 << 44))
def test_parts_cover_a_payload(nbytes):
    count = count_parts(nbytes)
    last = max(0, count - 2)
    ranges = [range_of_part(number, nbytes) for number in range(last, count)]
    assert ranges[-1][1] == nbytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert all(0 < end - start <= PART_BYTES for start, end in ranges)
    for beyond in (count, -1, 2**32 - 1 + count):
        with pytest.raises(ValueError, match="part"):
            range_of_part(beyond, nbytes)


@given(
    sizes=st.lists(st.integers(1, 3000) | st.just(PART_BYTES + 5), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 4000), max_size=20),
    late=st.booleans(),
    unwanted=st.sets(st.integers(0, 5)),
)
@settings(max_examples=40)
def test_payloads_arrive_however_they_are_split(sizes, cuts, late, unwanted):
    executor = Executor(2, "test-split")
    mine, other = socket.socketpair()
    end = End(executor)
    try:
        payloads = [some_bytes(size, number) for number, size in enumerate(sizes)]
        parts = [
            part(number, index, data)
            for number, data in enumerate(payloads)
            for index in reversed(range(count_parts(len(data))))
        ]
        stream = b"".join(parts)
        expected: dict[int, concurrent.futures.Future] = {}

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

        end.bundle.add(mine)
        if not late:
            announce()
        sender = threading.Thread(target=send)
        sender.start()
        if late:
            announce()
        for number, future in expected.items():
            assert future.result(20) == payloads[number]
        sender.join()
    finally:
        end.bundle.fail(ConnectionError("over"))
        executor.close(10)
        other.close()


@pytest.mark.parametrize("connections", [1, 2, 5])
def test_payloads_of_all_sizes(bundle, connections):
    sending, end = bundle(connections)
    payloads = {number: some_bytes(nbytes, number) for number, nbytes in enumerate(SIZES * 2, 1)}
    futures = {number: end.bundle.expect(number, len(data)) for number, data in payloads.items()}
    for number, data in payloads.items():
        sending.put(number, memoryview(data))
    for number, future in futures.items():
        assert future.result(20) == payloads[number]


def test_a_payload_waits_for_its_announcement_and_those_behind_it_do_too(bundle):
    sending, end = bundle(1)
    first, second = some_bytes(3 * PART_BYTES), some_bytes(1000, 1)
    later = end.bundle.expect(2, len(second))
    sending.put(1, memoryview(first))
    wait_until(lambda: end.bundle._waiting)
    sending.put(2, memoryview(second))
    with pytest.raises(TimeoutError):
        later.result(0)
    assert end.bundle.expect(1, len(first)).result(20) == first
    assert later.result(20) == second


def test_a_small_payload_that_waited_for_its_announcement_is_read(executor):
    end = End(executor)
    with socket.create_server(("127.0.0.1", 0)) as server:  # a unix socket would not wait for so many bytes
        other = socket.create_connection(server.getsockname())
        mine, _ = server.accept()
    end.bundle.add(mine)
    large, small = some_bytes(PART_BYTES + 100_000), some_bytes(1000)
    first = end.bundle.expect(1, len(large))
    sent = part(1, 1, large)
    other.sendall(sent[:1000])
    (connection,) = end.bundle._connections
    wait_until(lambda: connection._low_water > HEADER_BYTES + len(small))
    other.sendall(sent[1000:] + part(2, 0, small)[:HEADER_BYTES])
    wait_until(lambda: 2 in end.bundle._waiting)
    second = end.bundle.expect(2, len(small))
    other.sendall(part(2, 0, small)[HEADER_BYTES:])
    assert second.result(20) == small
    other.sendall(part(1, 0, large))
    assert first.result(20) == large
    end.bundle.fail(ConnectionError("the test is over"))
    other.close()


def test_a_payload_that_is_not_wanted_any_more_holds_up_none(bundle):
    sending, end = bundle(2)
    data = some_bytes(10 * PART_BYTES)
    unwanted = end.bundle.expect(1, len(data))
    end.bundle.discard(1, len(data))
    end.bundle.discard(2, len(data))
    for number in (1, 2, 3):
        sending.put(number, memoryview(data))
    assert end.bundle.expect(3, len(data)).result(20) == data
    assert unwanted.cancelled()


def test_a_small_payload_overtakes_a_large_one(executor):
    mine, theirs = socket.socketpair()
    sending = SendingBundle(1, [mine], executor, lambda _: None)
    sending.start()
    large, small = some_bytes(64 * PART_BYTES), some_bytes(5000, 1)
    sending.put(1, memoryview(large))
    sending.put(2, memoryview(small))
    wait_until(lambda: len(sending._payloads) == 2)
    reader = theirs.makefile("rb")
    order = []
    while 2 not in order:
        transfer_id, number = unpack_header(reader.read(HEADER_BYTES))
        order.append(transfer_id)
        data = large if transfer_id == 1 else small
        start, stop = range_of_part(number, len(data))
        assert reader.read(stop - start) == data[start:stop]
    assert len(order) <= 3
    sending.end("over")
    reader.close()
    theirs.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" * 16, "malformed bytes on a bulk connection: the header of a part begins with b'xxxx'"),
        (struct.pack("<4sIQ", b"part", 3, 1), "part 3 of a payload of 1048577 bytes"),
        (struct.pack("<4sIQ", b"part", 2**32 - 1, 1), "part 4294967295 of a payload"),
        (2 * (struct.pack("<4sIQ", b"part", 1, 1) + b"x"), "part 1 of transfer 1 was sent twice"),
        (b"", "connection for large payloads closed"),
        (b"part", "connection for large payloads closed"),
        (struct.pack("<4sIQ", b"part", 0, 1) + bytes(100), "connection for large payloads closed"),
    ],
    ids=["no header", "no such part", "the last number", "twice", "nothing", "half a header", "half a part"],
)
def test_a_connection_that_ends_badly_fails_what_is_expected(receiving, data, reason):
    end, other = receiving()
    first, second = end.bundle.expect(1, PART_BYTES + 1), end.bundle.expect(2, 10)
    other.sendall(data)
    if "closed" in reason:
        other.shutdown(socket.SHUT_RDWR)
    assert end.ended.wait(20)
    for future in (first, second, end.bundle.expect(3, 10)):
        with pytest.raises(PayloadLostError, match=reason):
            future.result(20)
    with pytest.raises(OSError, match="Broken pipe"):
        other.sendall(bytes(1 << 20))


def test_a_payload_that_is_announced_twice_is_refused(receiving):
    end, _ = receiving()
    end.bundle.expect(1, 10)
    with pytest.raises(ValueError, match="transfer 1 was announced twice"):
        end.bundle.expect(1, 10)


def test_the_end_of_a_connection_ends_the_others(executor):
    pairs = [socket.socketpair() for _ in range(3)]
    reasons = []
    ended = threading.Event()

    def on_end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    sending = SendingBundle(1, [mine for mine, _ in pairs], executor, on_end)
    sending.start()
    pairs[1][1].close()
    assert ended.wait(20)
    assert reasons == ["was closed by the peer"]
    for _, theirs in (pairs[0], pairs[2]):
        assert theirs.recv(1) == b""
        theirs.close()
    sending.put(1, memoryview(b"dropped"))


def test_a_forked_child_writes_nothing(bundle):
    sending, end = bundle(1)
    child = os.fork()
    if not child:
        sending.put(1, memoryview(b"from the child"))
        os._exit(0 if sending.has_ended else 1)
    assert os.waitpid(child, 0)[1] == 0
    sending.put(2, memoryview(b"from the parent"))
    assert end.bundle.expect(2, 15).result(20) == b"from the parent"


# The memory of received payloads.


def test_memory_is_used_again_when_nothing_refers_to_it():
    cache = BufferCache(1 << 20)
    first = np.asarray(cache.allocate(MIN_BLOCK_BYTES + 1))
    first[:] = 7
    address = first.ctypes.data
    view = torch.frombuffer(memoryview(first)[5:], dtype=torch.uint8).view(-1)[3:9]
    del first
    assert cache.free_bytes == 0
    other = np.asarray(cache.allocate(MIN_BLOCK_BYTES + 1))
    assert other.ctypes.data != address
    other[:] = 8
    assert view.tolist() == [7] * 6
    del view
    gc.collect()
    assert cache.free_bytes == 2 * MIN_BLOCK_BYTES
    assert np.asarray(cache.allocate(2 * MIN_BLOCK_BYTES)).ctypes.data == address


def test_no_more_memory_is_kept_than_allowed():
    cache = BufferCache(4 * MIN_BLOCK_BYTES)
    buffers = [cache.allocate(100) for _ in range(10)]
    large = cache.allocate(8 * MIN_BLOCK_BYTES)
    large[-1] = 1
    del large
    buffers.clear()
    assert cache.free_bytes == 4 * MIN_BLOCK_BYTES
    cache.remove_idle()
    assert cache.free_bytes == 4 * MIN_BLOCK_BYTES  # used since the last time
    cache.remove_idle()
    assert cache.free_bytes == 0
    with pytest.raises(RuntimeError, match="cannot allocate"):
        cache.allocate(1 << 60)


def test_nothing_is_kept_after_the_end():
    cache = BufferCache(1 << 20)
    kept, dropped = cache.allocate(100), cache.allocate(100)
    del dropped
    cache.close()
    kept[0] = 1
    del kept
    assert cache.free_bytes == 0


# The requests of peers.


def test_a_peer_gets_a_bounded_number_of_connections(agents):
    a, b = agents(2, transports=("tcp", "grpc"))
    assert rpc_through(a, b) == "ready"
    received = []
    a._network.channels.dependencies.sockets._requests[99] = a.peers.of(b.info), Recorder(received)
    for bundle, count in [(number, 2) for number in range(100, 110)] + [(200, 0), (201, 17), (100, 2)]:
        request = agent_pb2.BulkRequest(bundle=bundle, connections=count)
        b_id = b.info.id
        a._network.call_soon(a.peers.by_id[b_id].send_frame, agent_pb2.Frame(bulk_request=request))
    request = agent_pb2.BulkRequest(bundle=99, connections=1)
    a._network.call_soon(a.peers.of(b.info).send_frame, agent_pb2.Frame(bulk_request=request))
    wait_until(lambda: received)
    assert received == [[]]
    assert len(b.peers.of(a.info).channels.bulk.receiving) == bulk.MAX_BUNDLES


class Recorder:
    """Stands for the future of an offer."""

    def __init__(self, received: list) -> None:
        self._received = received

    def done(self) -> bool:
        return False

    def set_result(self, offers: object) -> None:
        self._received.append(list(offers))


def rpc_through(a, b):
    from gradwire.rpc.contracts.messages import MessageType, Request

    return a.request(b.info, Request(MessageType.CALL, (identity, ("ready",), {}))).wait()


@pytest.mark.parametrize("value", [0, -1, 17, 1.5, "2", None])
def test_the_number_of_connections_is_checked(value):
    with pytest.raises(ValueError, match=f"bulk_connections is {value!r}: give a"):
        rpc.ChannelOptions(bulk_connections=value)


def test_a_worker_that_shuts_down_offers_no_connections():
    """A peer may ask for them until its stream has ended, and nobody would close them any more."""
    answers: list[agent_pb2.Frame] = []
    peer: Any = SimpleNamespace(info=WorkerInfo("peer", 1), is_on_this_host=True, send_frame=answers.append)
    listener: Any = SimpleNamespace(on_offered=lambda _: True)

    async def ask() -> None:
        sockets = SocketListener(asyncio.get_running_loop(), [UNIX])
        await sockets.close()
        request = agent_pb2.BulkRequest(bundle=1, connections=2)
        BulkSockets(asyncio.get_running_loop(), sockets).on_request(peer, request, listener)
        assert answers == [agent_pb2.Frame(bulk_offer=agent_pb2.BulkOffer(bundle=1))]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(ask())
