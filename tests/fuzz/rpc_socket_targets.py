"""Parsers of rpc for what connections bring, on real sockets: hellos, nonces, frames, segments, parts and TLS."""

import asyncio
import fcntl
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gradwire.net.security import worker_host_name
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.channels.base import ChannelDependencies, PayloadLostError
from gradwire.rpc.channels.buffers import BufferCache
from gradwire.rpc.channels.bulk_connections import PART_BYTES, ReceivingBundle, pack_header
from gradwire.rpc.channels.chunked import ChunkedChannel, serve_chunks
from gradwire.rpc.channels.segments import SEALS
from gradwire.rpc.channels.shared_memory import PeerSegments, SharedMemory
from gradwire.rpc.contracts.options import ChannelOptions, RpcBackendOptions
from gradwire.rpc.contracts.worker import Member, RosterVersion, WorkerInfo
from gradwire.rpc.transports import envelope_socket
from gradwire.rpc.transports.envelope_socket import EnvelopeSocket, PulseExchange
from gradwire.rpc.transports.grpc_endpoint import PROTOCOL, GrpcEndpoint, Handshake, RefusedError
from gradwire.rpc.transports.liveness import Pulse
from gradwire.rpc.transports.socket_frames import FrameKind
from gradwire.rpc.transports.sockets import NONCE_BYTES, TCP, UNIX, OfferedSocket, SocketListener
from gradwire.rpc.transports.tls_socket import TlsSocket
from hypothesis import strategies as st

from tests.fuzz.framing import framed, unframed
from tests.fuzz.rpc_wire_targets import AUDIT, ME, MIB, PEER
from tests.fuzz.socket_frames import SEGMENT_BYTES, SOCKET_FRAMES
from tests.fuzz.target import Target
from tests.rpc.transports.tls_pairs import identity_of
from tests.simulated_peers import silent_peer

__all__ = ["RPC_SOCKET_TARGETS"]

_loop = asyncio.new_event_loop()

# The first message of a stream.

MAX_REFUSAL_CHARS = 1000
"""Of the text that a refused peer is told, and that is logged."""

HELLOS = st.builds(
    agent_pb2.Hello,
    protocol=st.sampled_from([PROTOCOL, 0, 2]),
    group=st.sampled_from(["job", "job", "other"]),
    worker_id=st.sampled_from([1, 1, 7, 2**32 - 1]),
    worker_name=st.sampled_from(["peer", "peer", "", "\u00e9", "n" * 300]),
    roster=st.builds(
        agent_pb2.RosterVersion, length=st.sampled_from([0, 1, 2**64 - 1]), digest=st.binary(max_size=40)
    ),
)
OPENINGS = HELLOS.map(lambda hello: agent_pb2.Frame(hello=hello).SerializeToString())


async def _refuse_roster(version: RosterVersion) -> None:
    raise RefusedError(f"a roster of {version.length} entries")


def read_hello(data: bytes) -> None:
    """Reads the first message of a stream, and admits a member."""

    async def read() -> bytes:
        return data

    async def receive() -> WorkerInfo:
        handshake = Handshake("job", ME, {1: silent_peer(PEER)}, _refuse_roster, GrpcEndpoint(ME.name, None))
        handshake.open(RosterVersion())
        worker, _ = await handshake.receive(SimpleNamespace(read=read, peer=lambda: "ipv4:127.0.0.1:1"))
        return worker

    refusal = ""
    try:
        admitted = _loop.run_until_complete(receive())
    except RefusedError as error:
        refusal = str(error)
    assert 0 < len(refusal) <= MAX_REFUSAL_CHARS or admitted == PEER


# Connections that say a nonce.

NONCE = bytes(range(NONCE_BYTES))


def say_nonce(data: bytes) -> None:
    """Says a nonce on a connection, which is used if it is that of an offer, and else closed."""
    ours, theirs = socket.socketpair()

    async def admit() -> bool:
        listener = SocketListener(_loop, [UNIX], audit=AUDIT)
        offered = listener._offered[NONCE] = OfferedSocket(_loop, UNIX, "nowhere", PEER)
        await listener._unadmitted.acquire()
        await listener._admit(UNIX, ours, "")
        is_admitted = offered._connection.done()
        offered.withdraw()
        return is_admitted

    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        assert _loop.run_until_complete(admit()) == data.startswith(NONCE)
    assert ours.fileno() == -1


ADDRESSES = st.sampled_from(
    ["127.0.0.1:1", "[::1]:1", "gradwire-0", "a" * 200, "host:port", "..:1", "\u00e9:1", ""]
)
OFFERS = st.builds(
    agent_pb2.Welcome,
    sockets=st.lists(
        st.builds(
            agent_pb2.SocketOffer,
            kind=st.sampled_from([UNIX, TCP, "other"]),
            address=ADDRESSES,
            nonce=st.binary(max_size=40),
        ),
        max_size=3,
    ),
)


class _OfflineLoop:
    """What dials by an event loop: looks for numeric addresses only, and connects to nobody."""

    time = staticmethod(_loop.time)

    async def getaddrinfo(self, host: str, port: str, **options: Any) -> list[Any]:
        return socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV, **options)

    async def sock_connect(self, connection: socket.socket, where: Any) -> None:
        if connection.family == socket.AF_UNIX:
            connection.connect(where)
        raise ConnectionRefusedError


def dial_offers(data: bytes) -> None:
    """Dials what a peer offers in its welcome."""
    loop: Any = _OfflineLoop()
    with suppress(envelope_socket.DecodeError):
        for offer in agent_pb2.Welcome.FromString(data).sockets:
            dialing = SocketListener(loop, [UNIX, TCP]).dial(Member(PEER, "127.0.0.1:1", 0), offer)
            assert _loop.run_until_complete(dialing) is None


# Sockets of envelopes.

MAX_MAPPED_BYTES = 64 << 10


class _Executor:
    """Runs what is submitted at once. Tells whether the socket is watched."""

    def __init__(self) -> None:
        self.is_watched = False
        self.poller = SimpleNamespace(
            unwatch=self._unwatch, watch_again=self.watch, hand_over=self.watch, wake=lambda: None
        )

    def watch(self, *_: object) -> None:
        self.is_watched = True

    def _unwatch(self, _descriptor: int) -> None:
        self.is_watched = False

    def submit(self, task: Callable[..., None], *args: Any) -> None:
        task(*args)

    def blocking(self) -> AbstractContextManager[None]:
        return nullcontext()


@cache
def _descriptors() -> list[int]:
    """Returns what a peer may send: a segment, a file that may change, and none."""
    made = [os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for name in ("sealed", "open")]
    for descriptor in made:
        os.ftruncate(descriptor, SEGMENT_BYTES)
    fcntl.fcntl(made[0], fcntl.F_ADD_SEALS, SEALS)
    return [*made, os.open(os.devnull, os.O_RDWR)]


SOCKET_INPUTS = st.builds(
    lambda descriptors, frames: bytes(descriptors) + b"".join(frames),
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=4, max_size=4),
    st.lists(SOCKET_FRAMES, max_size=6),
)


def read_socket(data: bytes) -> None:
    """Reads a socket of envelopes and segments."""
    descriptors, data = [_descriptors()[each] for each in data[:4] if each < 3], data[4:]
    before = len(os.listdir("/proc/self/fd"))
    executor: Any = _Executor()
    loop: Any = SimpleNamespace(call_soon_threadsafe=lambda *_: None)
    options = ChannelOptions(max_mapped_bytes=MAX_MAPPED_BYTES)
    segments = PeerSegments(SharedMemory(loop, executor, options))
    ends: list[str] = []

    def handle(envelope: agent_pb2.Envelope, *_: object) -> None:
        payload = envelope.body.segment
        with suppress(ValueError):
            segments.mapped.use(payload.number, payload.nbytes)[:1] = b"w"

    ours, theirs = socket.socketpair()
    with theirs, mock.patch.dict(envelope_socket._MAX_BYTES, {FrameKind.ENVELOPE: MIB}):
        reader = envelope_socket.FrameReader(handle, segments, PulseExchange(Pulse()), BufferCache(MIB).allocate)
        connection = EnvelopeSocket("unix", ours, executor, reader, ends.append)
        segments.connect(connection.writer)
        connection.start()
        if data:
            socket.send_fds(theirs, [data], descriptors)
        theirs.shutdown(socket.SHUT_WR)
        while executor.is_watched:
            connection.on_readable()
        connection.close()
    assert len(ends) == 1
    assert segments.mapped._mapped_bytes <= MAX_MAPPED_BYTES
    segments.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Bulk connections.

ANNOUNCED = {1: 10, 2: PART_BYTES + 10}
"""Bytes of payloads that are announced before their parts arrive, by transfer id."""
ANNOUNCED_LATE = {3: 20, 4: 2 * PART_BYTES}
DROPPED = {5: 30, 6: 2**64 - 1}

PARTS = st.builds(
    lambda header, content: header + content,
    st.builds(pack_header, st.integers(1, 7), st.sampled_from([0, 0, 0, 1, 2, 2**32 - 1])),
    st.sampled_from([10, 20, 30]).map(bytes),
)


def read_parts(data: bytes) -> None:
    """Reads a bulk connection. What is not announced stays in it."""
    before = len(os.listdir("/proc/self/fd"))
    executor: Any = _Executor()
    ends: list[None] = []
    bundle = ReceivingBundle(executor, BufferCache(MIB).allocate, lambda: ends.append(None))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        for transfer_id, nbytes in DROPPED.items():
            bundle.discard(transfer_id, nbytes)
        expected = {transfer_id: bundle.expect(transfer_id, nbytes) for transfer_id, nbytes in ANNOUNCED.items()}
        bundle.add(ours)
        connection = bundle._connections[0]
        _read_on(executor, connection)
        for transfer_id, nbytes in ANNOUNCED_LATE.items():
            expected[transfer_id] = bundle.expect(transfer_id, nbytes)
            _read_on(executor, connection)
        bundle.fail(PayloadLostError("the test is over"))
    assert len(ends) == 1
    for transfer_id, future in expected.items():
        if future.exception() is None:
            assert len(future.result()) == {**ANNOUNCED, **ANNOUNCED_LATE}[transfer_id] <= len(data)
    del connection
    del ours
    assert len(os.listdir("/proc/self/fd")) == before


def _read_on(executor: _Executor, connection: Any) -> None:
    while executor.is_watched:
        executor.is_watched = False
        connection._on_readable()


# Chunks.

CHUNKS = st.builds(
    agent_pb2.Chunks,
    chunks=st.lists(
        st.builds(agent_pb2.Chunk, transfer_id=st.integers(0, 8), data=st.binary(max_size=30)), max_size=4
    ),
).map(agent_pb2.Chunks.SerializeToString)


class _AbortedError(Exception):
    """The stream is ended."""


def transfer_chunks(data: bytes) -> None:
    """Sends payloads in chunks. What is not announced is not read."""
    _loop.run_until_complete(_transfer(unframed(data)))


async def _transfer(messages: list[bytes]) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    async def receive(_context: object) -> tuple[WorkerInfo, agent_pb2.Hello]:
        return PEER, agent_pb2.Hello()

    async def abort(*_: object) -> None:
        raise _AbortedError

    handshake: Any = SimpleNamespace(receive=receive, audit=AUDIT)
    broken: deque[str] = deque()
    peer: Any = SimpleNamespace(info=PEER, end=None, abort=broken.append, break_off=broken.append)
    nothing: Any = None
    dependencies = ChannelDependencies(_loop, nothing, RpcBackendOptions(), nothing, handshake, str)
    channel = ChunkedChannel(peer, dependencies)
    context = SimpleNamespace(abort=abort)
    task = asyncio.ensure_future(serve_chunks(handshake, lambda _id: channel, requests(), context))

    def payload(transfer_id: int, nbytes: int) -> agent_pb2.Payload:
        return agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=transfer_id, nbytes=nbytes))

    expected = []
    for transfer_id, nbytes in {**ANNOUNCED, **ANNOUNCED_LATE}.items():
        expected.append((nbytes, channel.receive(payload(transfer_id, nbytes))))
        for _ in range(4):
            await asyncio.sleep(0)
    for transfer_id, nbytes in DROPPED.items():
        channel.discard(payload(transfer_id, nbytes))
    channel.drop(ConnectionError("the test is over"))
    for _ in range(4):
        await asyncio.sleep(0)
    assert task.cancel() or task.done()
    with suppress(asyncio.CancelledError, _AbortedError):
        await task
    assert not broken
    for nbytes, future in expected:
        if future.exception() is None:
            assert len(future.result()) == nbytes


# TLS. The first input of a process makes certificates, which takes most of the memory.


def _client_hello(_: object = None) -> bytes:
    """Returns what a worker says first on a connection with TLS."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = TlsSocket(ours, _client_context(), "a.invalid")
        with suppress(OSError):
            client._ssl.do_handshake()
        return client._outgoing.read()


@cache
def _client_context() -> Any:
    return identity_of("b").client_context()


@cache
def _server_context() -> Any:
    return identity_of("a").server_context()


def shake_hands(data: bytes) -> None:
    """Accepts a connection on which a peer says these bytes, which has no certificate."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        accepted = TlsSocket(ours, _server_context(), None)
        with suppress(OSError):
            names = _loop.run_until_complete(accepted.handshake(_loop))
            raise AssertionError(f"{names} is admitted")


_pairs: list[list[TlsSocket]] = []
"""The ends of a connection on which only records have been sent."""


def _connect() -> list[TlsSocket]:
    """Connects two ends, of which the first has accepted the connection."""
    ours, theirs = socket.socketpair()
    ends = [
        TlsSocket(ours, _server_context(), None),
        TlsSocket(theirs, _client_context(), worker_host_name("a")),
    ]

    async def shake() -> None:
        await asyncio.gather(*(end.handshake(_loop) for end in ends))

    _loop.run_until_complete(shake())
    return ends


def read_records(data: bytes) -> None:
    """Reads records, between which there may be bytes that are none.

    Of the messages in an input, those with an even first byte are sent as records, the others as they are.
    """
    if not _pairs:
        _pairs.append(_connect())
    ours, theirs = _pairs.pop()
    expected = received = b""
    is_sound = True
    for message in unframed(data):
        if message and not message[0] % 2:
            theirs.sendmsg([message])
            expected += message * is_sound
        elif message:
            theirs._socket.send(message)
            is_sound = False
    try:
        while len(received) < len(expected) or not is_sound:
            received += ours.recv()
    except OSError:  # BlockingIOError, too: the beginning of a record
        assert not is_sound
    assert expected.startswith(received) if not is_sound else expected == received
    if is_sound:
        _pairs.append([ours, theirs])
    else:
        ours.close()
        theirs.close()


RECORDS = st.lists(st.binary(min_size=1, max_size=40), max_size=4).map(framed)


def _target(
    name: str,
    parse: Callable[[bytes], None],
    inputs: st.SearchStrategy[bytes],
    mebibytes: int,
    *,
    is_slow: bool = False,
) -> Target:
    return Target(name=f"rpc-{name}", parse=parse, inputs=inputs, max_bytes=mebibytes * MIB, is_slow=is_slow)


RPC_SOCKET_TARGETS = (
    _target("hello", read_hello, OPENINGS, 1),
    _target("nonce", say_nonce, st.sampled_from([NONCE, NONCE[:-1], NONCE[::-1], NONCE + b"more"]), 1),
    _target("offers", dial_offers, OFFERS.map(agent_pb2.Welcome.SerializeToString), 1),
    _target("socket", read_socket, SOCKET_INPUTS, 4),
    _target("parts", read_parts, st.lists(PARTS, max_size=5).map(b"".join), 1),
    _target("chunks", transfer_chunks, st.lists(CHUNKS, max_size=4).map(framed), 2, is_slow=True),
    _target("tls-handshake", shake_hands, st.none().map(_client_hello), 8),
    _target("tls-records", read_records, RECORDS, 8, is_slow=True),
)
