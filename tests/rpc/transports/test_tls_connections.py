"""Who gets a TCP connection beside the gRPC stream where there are credentials, and who does not."""

import asyncio
import logging
import re
import secrets
import select
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from gradwire.c10d import Credentials
from gradwire.net.addresses import PortRange
from gradwire.net.security import Identity, worker_host_name
from gradwire.rpc.contracts.worker import Member, WorkerInfo
from gradwire.rpc.transports import sockets
from gradwire.rpc.transports.sockets import TCP, OfferedSocket, SocketListener
from gradwire.rpc.transports.tls_socket import TlsSocket

from tests.rpc.transports.test_envelope_sockets import End, envelope, frame
from tests.rpc.transports.tls_pairs import authority, certified, expired, identity_of, tls_pair


def with_listener(
    test: Callable[[SocketListener, OfferedSocket], Awaitable[None]], identity: Identity | None
) -> None:
    """Runs a test with a listener of worker a, and what it offers to worker b."""

    async def run() -> None:
        listener = SocketListener(asyncio.get_running_loop(), [TCP], identity)
        listener.set_address("127.0.0.1", "127.0.0.1", PortRange())
        offered = listener.offer(WorkerInfo("b", 1), same_host=False)
        assert offered is not None
        try:
            await asyncio.wait_for(test(listener, offered), 30)
        finally:
            await listener.close()

    asyncio.run(run())


async def dial(identity: Identity | None, offered: OfferedSocket, worker: str = "a") -> bool:
    """Dials what is offered, as another worker; returns whether it is connected at both ends."""
    dialer = SocketListener(asyncio.get_running_loop(), [TCP], identity)
    dialed = await dialer.dial(Member(WorkerInfo(worker, 0), "127.0.0.1:1", 0), offered.offer)
    if dialed is None:
        return False
    (await offered.connection()).close()
    dialed.close()
    return True


def address(offered: OfferedSocket) -> tuple[str, int]:
    host, _, port = offered.offer.address.rpartition(":")
    return host, int(port)


async def read_to_end(connection: socket.socket) -> bytes:
    """Returns what a listener sends before it closes a connection."""
    received = b""
    with suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
            received += data
    return received


def test_the_worker_that_it_is_offered_to_gets_it():
    async def test(_: SocketListener, offered: OfferedSocket) -> None:
        assert await dial(identity_of("b"), offered)

    with_listener(test, identity_of("a"))


@pytest.mark.parametrize("how", ["token", "authority", "expired", "name", "listener", "no certificate", "no TLS"])
def test_others_do_not_get_it(how, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "gradwire.rpc.transports.sockets")
    ca = authority()
    mine, theirs = certified(ca, "a").identity("a"), certified(ca, "b").identity("b")
    worker = "a"
    reason = "certificate"
    # By chance a nonce begins like a message of SSLv2, for whose rest the TLS library then waits.
    monkeypatch.setattr(secrets, "token_bytes", lambda size: b"\1" * size)
    if how == "token":
        theirs = identity_of("b")
    elif how == "authority":
        theirs = certified(authority(), "b").identity("b")
    elif how == "expired":
        theirs = expired(ca, "b", monkeypatch)
        reason = "certificate expired"
    elif how == "name":
        theirs = certified(ca, "c").identity("c")
        reason = "its certificate is not for worker 'b'"
    elif how == "listener":
        worker = "c"
        reason = "Hostname mismatch"
    elif how == "no certificate":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=certified(ca, "b").ca.decode())
        monkeypatch.setattr(theirs, "client_context", lambda: context)
    elif how == "no TLS":
        theirs = None
        reason = "WRONG_VERSION_NUMBER"

    async def test(_: SocketListener, offered: OfferedSocket) -> None:
        assert not await dial(theirs, offered, worker)
        if how != "name":  # who has said the nonce may not try again
            assert await dial(certified(ca, "b").identity("b"), offered)

    with_listener(test, mine)
    assert reason in caplog.text


def test_new_connections_use_new_certificates(tmp_path):
    def replace_files() -> Identity:
        """Writes certificates of worker a by a new CA, and returns the identity that worker b has by it."""
        ca = authority()
        made = certified(ca, "a")
        for name, path in paths.items():
            (tmp_path / "new").write_bytes(getattr(made, name))
            (tmp_path / "new").rename(path)
        return certified(ca, "b").identity("b")

    paths = {name: tmp_path / name for name in ("ca", "certificate", "key")}
    before = replace_files()

    async def test(listener: SocketListener, offered: OfferedSocket) -> None:
        assert await dial(before, offered)
        after = replace_files()
        offered = listener.offer(WorkerInfo("b", 1), same_host=False)
        assert not await dial(before, offered)
        assert await dial(after, offered)

    with_listener(test, Credentials(**paths).identity("a"))


def test_a_worker_with_credentials_sends_nothing_to_one_without(caplog):
    caplog.set_level(logging.INFO, "gradwire.rpc.transports.sockets")

    async def test(_: SocketListener, offered: OfferedSocket) -> None:
        assert not await dial(identity_of("b"), offered)

    with_listener(test, None)
    assert "no tcp socket to 127.0.0.1" in caplog.text


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    hello = identity_of("b").client_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="a")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        client_hello()[:100],
        client_hello(),
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        bytes(32),
        b"GET / HTTP/1.1",
    ],
    ids=["nothing", "half a hello", "a hello", "a record that is too long", "a nonce", "HTTP"],
)
def test_who_stops_in_the_handshake_is_cut_off_and_holds_up_nobody(sent, monkeypatch):
    monkeypatch.setattr(sockets, "NONCE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sockets, "MAX_UNADMITTED", 2)

    async def test(_: SocketListener, offered: OfferedSocket) -> None:
        loop = asyncio.get_running_loop()
        strangers = [socket.create_connection(address(offered)) for _ in range(6)]
        for stranger in strangers:
            stranger.settimeout(0)
            with suppress(ConnectionError):
                await loop.sock_sendall(stranger, sent)

        async def dial_until_connected() -> bool:
            while not await dial(identity_of("b"), offered):
                """On a busy machine, its handshake may take longer than all have."""
            return True

        connected = loop.create_task(dial_until_connected())
        for stranger in strangers:
            assert offered.offer.nonce not in await read_to_end(stranger)
            stranger.close()
        assert await connected

    with_listener(test, identity_of("a"))


def test_a_peer_that_leaves_out_the_nonce_is_cut_off():
    async def test(_: SocketListener, offered: OfferedSocket) -> None:
        loop = asyncio.get_running_loop()
        connection = socket.create_connection(address(offered))
        peer = TlsSocket(connection, identity_of("b").client_context(), worker_host_name("a"))
        names = await peer.handshake(loop)
        assert worker_host_name("a") in names
        peer.send(bytes(31))
        with pytest.raises(ConnectionResetError):
            await peer.receive_soon(loop, 1)
        peer.close()

    with_listener(test, identity_of("a"))


# After the handshake.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "closed without a goodbye"),
        (lambda _: b"", "closed without a goodbye"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "connection broke: .*BAD_RECORD_MAC"),
        (lambda data: data + data, "connection broke: .*BAD_RECORD_MAC"),
        (lambda _: frame(envelope(7)), "connection broke: .*SSL"),
        (lambda data: data[:3] + struct.pack(">H", 1 << 15) + data[5:], "connection broke: .*LENGTH_TOO_LONG"),
    ],
    ids=["part of a record", "nothing", "a wrong byte", "a record again", "no TLS", "a record that is too long"],
)
def test_a_connection_that_ends_badly_says_how(executor, change, reason):
    mine, other = socket.socketpair()
    receiver, sender = tls_pair(mine, other)
    end = End(receiver, executor)
    end.socket.start()
    sender._write(frame(envelope(1)))
    other.sendall(change(sender._outgoing.read()))
    if "closed" in reason:
        other.shutdown(socket.SHUT_WR)
    assert end.ended.wait(20)
    assert len(end.reasons) == 1
    assert re.search(reason, end.reasons[0])
    with pytest.raises(BrokenPipeError):
        end.socket.writer.send(b"more")
    other.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_a_peer_may_change_its_keys(executor, tmp_path):
    """It also asks this end to change its own, which the library does when it next sends."""
    ca = authority()
    theirs = certified(ca, "b")
    for name in ("ca", "certificate", "key"):
        (tmp_path / name).write_bytes(getattr(theirs, name))
    listener = socket.create_server(("127.0.0.1", 0))
    command = ["openssl", "s_client", "-tls1_3", "-connect", f"127.0.0.1:{listener.getsockname()[1]}"]
    command += ["-CAfile", tmp_path / "ca", "-cert", tmp_path / "certificate", "-key", tmp_path / "key"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer, listener:
        connection = TlsSocket(listener.accept()[0], certified(ca, "a").identity("a").server_context(), None)

        async def connect() -> None:
            await connection.handshake(asyncio.get_running_loop())

        asyncio.run(connect())
        received = b""
        for number in range(3):
            line = b"line %d\n" % number
            peer.stdin.write(b"K\n")
            peer.stdin.flush()
            select.select([connection], [], [], 20)
            with pytest.raises(BlockingIOError):
                connection.recv()
            peer.stdin.write(line)
            peer.stdin.flush()
            while not received.endswith(line):
                select.select([connection], [], [], 20)
                with suppress(BlockingIOError):
                    received += connection.recv()
            connection.send(line)
            while peer.stdout.readline() != line:
                pass
        peer.stdin.close()
        connection.close()
    assert received == b"line 0\nline 1\nline 2\n"
