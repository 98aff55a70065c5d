"""Who opens a stream is let in by its hello, and tells nothing of the worker that it says it is before that."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from gradwire.c10d import HashStore
from gradwire.errors import WorkerLostError
from gradwire.net.event_loop import EventLoop, acquire_event_loop
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.contracts.options import RpcBackendOptions
from gradwire.rpc.contracts.worker import Member, RosterVersion, WorkerInfo
from gradwire.rpc.membership.roster import RosterLog
from gradwire.rpc.transports import grpc_endpoint, grpc_stream, sockets
from gradwire.rpc.transports.grpc_endpoint import EXCHANGE_METHOD, PROTOCOL, TRANSFER_METHOD, GrpcEndpoint, aio
from gradwire.rpc.transports.grpc_stream import StreamState

from tests.addresses import address_here
from tests.remote_functions import identity, wait_until

HELLO = agent_pb2.Hello(protocol=PROTOCOL, group="test", worker_id=1, worker_name="agent1")
OPENING = {
    EXCHANGE_METHOD: agent_pb2.Frame(hello=HELLO).SerializeToString(),
    TRANSFER_METHOD: agent_pb2.Chunks(hello=HELLO).SerializeToString(),
}

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client says before it opens a stream; with empty settings."""

both_methods = pytest.mark.parametrize("method", [EXCHANGE_METHOD, TRANSFER_METHOD])


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    events = acquire_event_loop()
    yield events
    events.release()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has agents wait for a hello for half a second only."""
    monkeypatch.setattr(grpc_endpoint, "HELLO_TIMEOUT_S", 0.5)


class Stranger:
    """Streams to one agent, each by a connection of its own."""

    def __init__(self, agent: GrpcAgent) -> None:
        self.address = address_of(agent)
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "Stranger":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._opened.aclose()

    async def open(self, method: str = EXCHANGE_METHOD) -> Any:
        """Opens a stream, and says nothing."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = aio.insecure_channel(self.address, options=options)
        await self._opened.enter_async_context(channel)
        return (channel.stream_stream if method == EXCHANGE_METHOD else channel.stream_unary)(method)()


def address_of(agent: GrpcAgent) -> str:
    return agent.peers.by_id[agent.info.id].member.address


async def status_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(20):
        return await call.code()


def check_calls(a: GrpcAgent, b: GrpcAgent) -> None:
    """Checks that two agents call each other, and that neither has lost the other."""
    for one, other in ((a, b), (b, a)):
        assert one.request(other.info, Request(MessageType.CALL, (identity, (1,), {}))).wait() == 1
        assert one.end_of(other.info.id) is None


@both_methods
def test_who_says_no_hello_is_dropped(agents, loop, impatient, method):
    a, b = agents(2)

    async def wait_in_silence() -> grpc.StatusCode:
        async with Stranger(a) as stranger:
            return await status_of(await stranger.open(method))

    assert loop.run(wait_in_silence(), 30) is grpc.StatusCode.UNAVAILABLE  # so a slow worker tries again
    check_calls(a, b)


@pytest.mark.parametrize(
    "said", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", b"GET / HTTP/1.1\r\n"]
)
def test_who_opens_no_stream_is_dropped(agents, impatient, said):
    a, b = agents(2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30)
        stranger.connect(address_of(a).removeprefix("unix:"))
        stranger.sendall(said)
        try:
            while stranger.recv(1000):
                pass
        except ConnectionResetError:
            pass
    check_calls(a, b)


def test_few_streams_wait_to_be_admitted(agents, loop, monkeypatch):
    monkeypatch.setattr(grpc_endpoint, "MAX_UNADMITTED", 3)
    monkeypatch.setattr(grpc_endpoint, "HELLO_TIMEOUT_S", 60.0)
    a, b = agents(2)

    async def open_many() -> None:
        async with Stranger(a) as stranger:
            silent = [await stranger.open() for _ in range(3)]
            for call in silent:  # sends the header
                await call.wait_for_connection()
            await wait_for(lambda: a._network._handshake._unadmitted == 3)
            assert await status_of(await stranger.open()) is grpc.StatusCode.UNAVAILABLE
            silent.pop().cancel()
            await wait_for(lambda: a._network._handshake._unadmitted == 2)

    loop.run(open_many(), 30)
    check_calls(a, b)


async def wait_for(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_at_most_so_many_streams_are_read_at_a_time(agents, loop, monkeypatch):
    monkeypatch.setattr(grpc_endpoint, "MAX_SILENT", 1)
    a, b = agents(2)

    async def open_two() -> str:
        async with Stranger(a) as stranger:
            silent, speaking = await stranger.open(), await stranger.open()
            await silent.wait_for_connection()
            await wait_for(a._network._handshake._silent.locked)
            await speaking.write(agent_pb2.Frame(hello=agent_pb2.Hello()).SerializeToString())
            silent.cancel()
            await status_of(speaking)
            return str(await speaking.details())

    assert "speaks protocol" in loop.run(open_two(), 30)
    check_calls(a, b)


@both_methods
@pytest.mark.parametrize(
    ("first", "text"),
    [
        (b"", "speaks protocol 1, '' speaks 0"),
        (b"\xff\xff\xff", "no hello"),
        (bytes(grpc_endpoint.MAX_HELLO_BYTES + 1), "bytes, of"),
        # Envelopes, which would take 56 bytes each if they were parsed.
        (b"\x0a\x00" * (grpc_endpoint.MAX_HELLO_BYTES // 2), "speaks protocol 1, '' speaks 0"),
    ],
    ids=["empty", "no hello", "long", "many empty envelopes"],
)
def test_what_is_no_hello_is_refused(agents, loop, method, first, text):
    a, b = agents(2)

    async def say() -> tuple[grpc.StatusCode, str]:
        async with Stranger(a) as stranger:
            call = await stranger.open(method)
            await call.write(first)
            return await status_of(call), str(await call.details())

    code, details = loop.run(say(), 30)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert text in details
    check_calls(a, b)


@pytest.mark.parametrize("number", [grpc_endpoint.MAX_CONNECTION + 1, 2**64 - 1])
def test_a_number_of_a_connection_that_nobody_counts_to_is_refused(agents, loop, number):
    """Counting on from it would leave the range of the number, after which the link could not heal."""
    a, b = agents(2)
    check_calls(a, b)
    hello = agent_pb2.Hello()
    hello.CopyFrom(HELLO)
    hello.connection = number

    async def say() -> tuple[grpc.StatusCode, str]:
        async with Stranger(a) as stranger:
            call = await stranger.open()
            await call.write(agent_pb2.Frame(hello=hello).SerializeToString())
            return await status_of(call), str(await call.details())

    code, details = loop.run(say(), 30)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"its connection has number {number}" in details
    check_calls(a, b)


def test_a_second_stream_of_a_connected_worker_is_not_used(agents, loop, tmp_path):
    a, b = agents(2)
    check_calls(a, b)
    transport = a.peers.by_id[1].transport
    connection = transport.outbox.socket

    async def open_second() -> None:
        async with Stranger(a) as stranger:
            call = await stranger.open()
            envelope = agent_pb2.Envelope(id=1, type=MessageType.CALL)
            envelope.body.inline = b"cposix\nmkdir\n(V%s\ntR." % os.fsencode(tmp_path / "trace")
            following = agent_pb2.Frame(envelopes=[envelope], goodbye=True).SerializeToString()
            await call.write(OPENING[EXCHANGE_METHOD] + following)  # one frame, after which the stream may end
            assert agent_pb2.Frame.FromString(await call.read()).welcome.duplicate
            assert await call.read() is aio.EOF

    loop.run(open_second(), 30)
    check_calls(a, b)
    assert a.peers.by_id[1].transport.outbox.socket is connection
    assert not os.path.exists(tmp_path / "trace")


def test_who_leaves_with_payloads_unsent_is_lost_at_once(agents, loop, monkeypatch):
    """They were announced, but will not be sent: its goodbye does not say that they are on their way."""
    monkeypatch.setattr(grpc_stream, "ARRIVAL_TIMEOUT_S", 600)
    a, _ = agents(2, transports=("grpc",))
    envelope = agent_pb2.Envelope(id=1, type=MessageType.CALL, has_payloads=True)
    envelope.body.chunked.transfer_id, envelope.body.chunked.nbytes = 1, 1000

    async def leave() -> None:
        async with Stranger(a) as stranger:
            call = await stranger.open()
            await call.write(OPENING[EXCHANGE_METHOD])
            await call.read()
            await call.write(agent_pb2.Frame(envelopes=[envelope]).SerializeToString())
            await wait_for(lambda: a.peers.by_id[1].channels.announced.count == 1)
            await call.write(agent_pb2.Frame(goodbye=True).SerializeToString())
            assert await call.read() is aio.EOF

    loop.run(leave(), 30)
    wait_until(lambda: a.end_of(1) is not None)


def test_a_second_stream_for_payloads_is_not_used(agents, loop):
    a, b = agents(2, transports=("grpc",))
    check_calls(a, b)

    async def open_two() -> list[grpc.StatusCode]:
        async with Stranger(a) as stranger:
            first = await stranger.open(TRANSFER_METHOD)
            await first.write(OPENING[TRANSFER_METHOD])
            await wait_for(lambda: a.peers.by_id[1].channels.chunked.is_served)
            second = await stranger.open(TRANSFER_METHOD)
            await second.write(OPENING[TRANSFER_METHOD])
            codes = [await status_of(second)]
            await first.done_writing()
            return [*codes, await status_of(first)]

    assert loop.run(open_two(), 30) == [grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.OK]
    check_calls(a, b)


def test_a_stream_of_a_worker_that_was_connected_is_refused(agents, loop):
    a, b = agents(2)
    check_calls(a, b)
    b.shutdown(graceful=False, timeout=0)
    wait_until(lambda: a.end_of(1) is not None)

    async def open_again() -> tuple[grpc.StatusCode, str]:
        async with Stranger(a) as stranger:
            call = await stranger.open()
            await call.write(OPENING[EXCHANGE_METHOD])
            return await status_of(call), str(await call.details())

    assert loop.run(open_again(), 30) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "it has given this worker up: it has shut down",
    )
    with pytest.raises(WorkerLostError, match="it has shut down"):
        a.request(b.info, Request(MessageType.CALL, (identity, (1,), {}))).wait()


@pytest.mark.parametrize("has_used_channels", [True, False])
def test_a_stream_for_payloads_of_a_worker_that_is_lost_is_refused(agents, loop, has_used_channels):
    a, b = agents(2, transports=("grpc",))
    check_calls(a, b)
    if has_used_channels:
        call = b.request(a.info, Request(MessageType.CALL, (torch.numel, (torch.ones(1 << 20),), {})))
        assert call.wait() == 1 << 20
    b.shutdown(graceful=False, timeout=0)
    wait_until(lambda: a.end_of(1) is not None)

    async def open_again() -> grpc.StatusCode:
        async with Stranger(a) as stranger:
            call = await stranger.open(TRANSFER_METHOD)
            await call.write(OPENING[TRANSFER_METHOD])
            return await status_of(call)

    assert loop.run(open_again(), 30) is grpc.StatusCode.ALREADY_EXISTS


def test_a_stream_that_is_closed_before_the_members_are_known_tells_nothing(loop):
    agents = [
        GrpcAgent(WorkerInfo(f"agent{rank}", rank), RpcBackendOptions(), "test", RosterLog(HashStore(), "test"))
        for rank in range(2)
    ]
    try:
        a, b = agents
        members = [Member(agent.info, agent.listen(address_here())) for agent in agents]
        a._network.open(members, a.control)

        async def open_and_leave() -> None:
            async with Stranger(a) as stranger:
                call = await stranger.open()
                await call.write(OPENING[EXCHANGE_METHOD])
                await wait_for(lambda: a._network._handshake._unadmitted == 1)
                call.cancel()
                await wait_for(lambda: a._network._handshake._unadmitted == 0)

        loop.run(open_and_leave(), 30)
        for agent in agents:
            agent.open(members)
        a.connect(b.info)
        stream: Any = a.peers.by_id[1].transport
        wait_until(lambda: stream._state is StreamState.OPEN)
        assert a.end_of(1) is None
    finally:
        for agent in agents:
            agent.shutdown(graceful=False, timeout=0)


def test_a_stream_that_is_closed_before_it_is_welcomed_tells_nothing(agents, loop):
    a, b = agents(2)
    stream = a.peers.by_id[1].transport

    async def read() -> None:
        raise AssertionError("nothing is to be read")

    async def write(data: bytes) -> None:
        raise aio.UsageError("the stream has ended")

    async def accept_closed_stream() -> None:
        assert stream.accept()
        await stream.welcome(read, write, "ipv4:127.0.0.1:1")

    loop.run(accept_closed_stream(), 20)
    check_calls(a, b)


def opening(version: RosterVersion) -> bytes:
    hello = agent_pb2.Hello(protocol=PROTOCOL, group="test", worker_id=7, worker_name="w")
    hello.roster.length, hello.roster.digest = version.length, version.digest
    return agent_pb2.Opening(hello=hello).SerializeToString()


@pytest.mark.parametrize(
    ("known", "said", "text"),
    [
        (RosterVersion(), RosterVersion(40_000), "learned 40000"),
        (RosterVersion(30_000), RosterVersion(2**64 - 1), "learned 18446744073709551615"),
        (RosterVersion(), RosterVersion(1, bytes(5_000)), "bytes, of"),
        (RosterVersion(), RosterVersion(), "knows no 'w'"),
    ],
    ids=["new", "more", "too long", "nothing"],
)
def test_what_the_sender_of_a_hello_knows_is_learned(loop, known, said, text):
    """Nobody can have a worker parse much before it is known who he is."""

    async def learn(version: RosterVersion) -> None:
        raise grpc_endpoint.RefusedError(f"learned {version.length}")

    async def receive() -> None:
        receiving = grpc_endpoint.Handshake("test", WorkerInfo("me", 0), {}, learn, GrpcEndpoint("me", None))
        receiving.open(known)
        await receiving.receive(SimpleNamespace(read=read, peer=lambda: "unix:"))

    async def read() -> bytes:
        return opening(said)

    with pytest.raises(grpc_endpoint.RefusedError, match=text):
        loop.run(receive(), 30)


@pytest.mark.parametrize(
    ("kind", "address", "nonce"),
    [
        ("unix", "of-another-program", bytes(32)),
        ("tcp", "localhost:{port}", bytes(32)),
        ("tcp", "127.0.0.1:{port}", b"POST / HTTP/1.1\r\n"),
    ],
    ids=["unix", "name", "text"],
)
def test_a_worker_connects_to_no_other_program_for_a_peer(kind, address, nonce):
    async def run() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as program, socket.create_server(("127.0.0.1", 0)) as server:
            program.bind("\0of-another-program")
            program.listen()
            listener = sockets.SocketListener(loop, [sockets.UNIX, sockets.TCP])
            where = address.format(port=server.getsockname()[1])
            offer = agent_pb2.SocketOffer(kind=kind, address=where, nonce=nonce)
            assert await listener.dial(Member(WorkerInfo("b", 1), "127.0.0.1:1", 0), offer) is None
            for each in (program, server):
                each.settimeout(0)
                with pytest.raises(BlockingIOError):
                    each.accept()
            await listener.close()

    asyncio.run(run())
