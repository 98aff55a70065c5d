"""What ends a stream, or its socket, while they are being opened."""

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.options import Liveness
from gradwire.rpc.contracts.worker import Member, WorkerInfo
from gradwire.rpc.execution.executor import Executor
from gradwire.rpc.transports.grpc_endpoint import aio
from gradwire.rpc.transports.grpc_stream import GrpcStream
from gradwire.rpc.transports.liveness import Heartbeats, Pulse
from gradwire.rpc.transports.outbox import Outbox, StreamParts
from gradwire.rpc.transports.sockets import SocketListener


def parts(listener: Any, executor: Any = None) -> Any:
    """Returns what the streams of an agent have, as far as they use it here."""
    loop = asyncio.get_running_loop()
    handshake = SimpleNamespace(me=SimpleNamespace(wire_id=0, name="a"), endpoint=SimpleNamespace(identity=None))
    heartbeats = Heartbeats(loop, Liveness(), Pulse())
    return StreamParts(loop, handshake, heartbeats, listener, executor, memoryview)  # type: ignore[arg-type]


def peer(seen: list[str]) -> Any:
    """Returns the worker at the other end, which notes what it is told."""
    return SimpleNamespace(
        info=SimpleNamespace(wire_id=1, name="b"),
        member=Member(WorkerInfo("b", 1), "127.0.0.1:1", 0),
        is_on_this_host=False,
        breaks=0,
        on_opened=lambda: seen.append("opened"),
        on_broken=lambda end, _unsent: seen.append(end.reason),
        on_closed=lambda end, _unsent=(): seen.append(end.reason),
        on_envelope=lambda *_, **__: None,
        on_frame=lambda _: None,
    )


@pytest.mark.parametrize("end", [GrpcStream.abort, GrpcStream.break_off])
def test_a_stream_that_ends_during_its_welcome_stays_ended(end):
    """Another one may have taken its place."""

    async def check() -> None:
        seen: list[str] = []
        stream = GrpcStream(parts(SimpleNamespace(offer=lambda *_, **__: None)), peer(seen), "127.0.0.1:1")
        is_writing, may_end = asyncio.Event(), asyncio.Event()

        async def write(_: bytes) -> None:
            is_writing.set()
            await may_end.wait()

        async def read() -> Any:
            return aio.EOF

        assert stream.accept()
        welcome = asyncio.create_task(stream.welcome(read, write, "ipv4:127.0.0.1:5"))
        await is_writing.wait()
        end(stream, "it has to")
        may_end.set()
        await asyncio.wait_for(welcome, 20)
        assert seen == ["it has to"]

    asyncio.run(check())


def choose(
    executor: Executor, prepare: Callable[[Outbox, socket.socket], object]
) -> tuple[Outbox, list[str], bool]:
    """Connects a socket that the peer offers.

    Args:
        executor: reads the socket.
        prepare: called with the outbox, and the other end of the socket, when the socket is connected.

    Returns:
        The outbox; the reasons that the stream was told; and whether the socket is closed.
    """
    mine, other = socket.socketpair()
    reasons: list[str] = []

    async def check() -> Outbox:
        async def dial(*_: object) -> socket.socket:
            prepare(outbox, other)
            return mine

        made = parts(SimpleNamespace(dial=dial), executor)
        outbox = Outbox(made, peer([]), "127.0.0.1:1", lambda: None, lambda reason, _: reasons.append(reason))
        for number in range(1, 4):
            outbox.put(agent_pb2.Envelope(id=number).SerializeToString())
        before = asyncio.all_tasks()
        outbox.choose(agent_pb2.SocketOffer(kind="tcp"), 0.0)
        await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - before)), 20)
        return outbox

    outbox = asyncio.run(check())
    other.close()
    return outbox, reasons, mine.fileno() == -1


def test_a_socket_for_which_no_descriptor_is_left_breaks_the_stream(executor):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave_none(*_: object) -> None:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))

    try:
        outbox, reasons, is_closed = choose(executor, leave_none)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert reasons == ["its connection broke: [Errno 24] Too many open files"]
    assert is_closed
    assert outbox.socket is None


def test_a_socket_that_breaks_at_once_breaks_the_stream(executor):
    outbox, (reason,), is_closed = choose(executor, lambda _, other: other.close())
    assert "its connection closed without a goodbye" in reason
    assert is_closed
    assert outbox.next_frame() == b""  # the stream does not carry what the socket may have carried


def test_a_socket_that_is_connected_after_the_end_of_its_stream_is_closed(executor):
    outbox, reasons, is_closed = choose(executor, lambda outbox, _: outbox.close("it has to"))
    assert not reasons
    assert is_closed
    assert outbox.socket is None


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "unix:a"])
def test_a_worker_connects_to_no_other_host_than_its_peers(address):
    """It would say a nonce of the peer's choice to any program."""

    async def check() -> bool:
        loop = asyncio.get_running_loop()
        listener = SocketListener(loop, ["tcp"])
        with socket.create_server(("127.0.0.1", 0)) as other:
            offer = agent_pb2.SocketOffer(
                kind="tcp", address=f"127.0.0.1:{other.getsockname()[1]}", nonce=bytes(32)
            )
            dialing = asyncio.create_task(listener.dial(Member(WorkerInfo("b", 1), address, 0), offer))
            other.settimeout(0)
            accepting = asyncio.create_task(loop.sock_accept(other))
            await asyncio.wait((dialing, accepting), timeout=20, return_when=asyncio.FIRST_COMPLETED)
            is_connected = accepting.done()
            if is_connected:
                accepting.result()[0].close()
            for task in (dialing, accepting):
                task.cancel()
            await asyncio.gather(dialing, accepting, return_exceptions=True)
        return is_connected

    assert asyncio.run(check()) is ("::1" not in address)
