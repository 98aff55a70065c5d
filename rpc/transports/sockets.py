"""How two workers get a socket beside their gRPC stream: a unix socket on one host, TCP between hosts.

The worker that accepts the stream offers an address and a nonce of 32 random bytes in its Welcome; the other one
dials the address and begins with the nonce. So whoever may use the stream may use the socket, and nobody else.
Unix sockets have names in the abstract namespace, of which nothing is left however a process ends; both ends check
that the other one belongs to the same user. The listeners are made when they are first needed.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

from ...c10d.addresses import format_address
from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo
from ..execution.executor import Executor
from .base import TransportListener
from .envelope_socket import EnvelopeSocket, OnSocketEnd, SegmentListener

__all__ = [
    "OFFER_TIMEOUT_S",
    "TCP",
    "UNIX",
    "FrameListener",
    "OfferedSocket",
    "SocketListener",
    "SocketParts",
    "dial",
]

UNIX = "unix"
TCP = "tcp"

NONCE_BYTES = 32
NONCE_TIMEOUT_S = 2.0
"""Seconds that a connection may take to say its nonce."""

CONNECT_TIMEOUT_S = 5.0
"""Seconds that the offered address may take to accept a connection, and the dialing worker to dial it."""

OFFER_TIMEOUT_S = CONNECT_TIMEOUT_S + NONCE_TIMEOUT_S
"""Seconds after which an offer is void."""

MAX_UNADMITTED = 64
"""Connections that may not have said their nonce yet; further ones wait to be accepted."""

KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""How the kernel finds out that the other host has lost power or network: after 20 + 4 * 5 idle seconds."""

_ADMITTED = b"\x01"
_CREDENTIALS = struct.Struct("3i")
"""The layout of SO_PEERCRED: process, user and group."""

log = logging.getLogger(__name__)


class FrameListener(Protocol):
    """Handles fields of frames that have nothing to do with envelopes. Called on the event loop."""

    def on_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Handles the frame of a peer; most frames have no such field."""


@final
class OfferedSocket:
    """A connection that another worker may make, once. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: str, address: str) -> None:
        self.offer = agent_pb2.SocketOffer(kind=kind, address=address, nonce=secrets.token_bytes(NONCE_BYTES))
        """The offer to tell the other worker."""
        self._connection: asyncio.Future[socket.socket] = loop.create_future()

    def admit(self, connection: socket.socket) -> None:
        """Takes over the connection that has said the nonce."""
        if self._connection.done():
            connection.close()
        else:
            self._connection.set_result(connection)

    async def connection(self, seconds: float = NONCE_TIMEOUT_S) -> socket.socket:
        """Waits for the connection. Raises TimeoutError.

        Args:
            seconds: how long; by default as long as it takes if the other worker says that it has made it.
        """
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self._connection)

    def withdraw(self) -> None:
        """Closes the connection if it has been made and not been used."""
        if not self._connection.cancel():
            self._connection.result().close()


@final
class SocketListener:
    """Makes offers, and waits for the connections to them. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kinds: Sequence[str]) -> None:
        """Listens nowhere yet.

        Args:
            loop: the event loop.
            kinds: UNIX, TCP or both: what may be offered.
        """
        self._loop = loop
        self.kinds = kinds
        """What may be offered."""
        self._where = ("", "")
        self._listeners: dict[str, socket.socket] = {}
        self._accepting: set[asyncio.Task[None]] = set()
        self._unadmitted = asyncio.Semaphore(MAX_UNADMITTED)
        self._offered: dict[bytes, OfferedSocket] = {}
        """The connections that are offered and have not been made, by nonce."""

    def set_address(self, bind: str, advertised: str) -> None:
        """Sets the address that TCP connections are accepted at, and the one that others dial."""
        self._where = bind, advertised

    def offer(self, *, same_host: bool) -> OfferedSocket | None:
        """Offers a connection to a worker; returns None if there is nothing to offer.

        Args:
            same_host: whether the worker is on this host, and in this network namespace.
        """
        kind = UNIX if same_host and UNIX in self.kinds else TCP
        if kind not in self.kinds:
            return None
        try:
            address = self._listen(kind)
        except OSError as error:
            log.warning("cannot listen on a %s socket, so gRPC carries the calls: %s", kind, error)
            return None
        offered = OfferedSocket(self._loop, kind, address)
        self._offered[offered.offer.nonce] = offered
        self._loop.call_later(OFFER_TIMEOUT_S, self._offered.pop, offered.offer.nonce, None)
        return offered

    async def close(self) -> None:
        """Stops listening; connections that were not asked for are closed."""
        self._offered.clear()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()

    def _listen(self, kind: str) -> str:
        """Returns the address of a listener, which is made if there is none."""
        if kind not in self._listeners:
            self._listeners[kind] = self._make_listener(kind)
            self._start(self._accept(self._listeners[kind]))
        name = self._listeners[kind].getsockname()
        if kind == UNIX:
            return str(name[1:].decode())
        return format_address(self._where[1], name[1])

    def _make_listener(self, kind: str) -> socket.socket:
        if kind == UNIX:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0gradwire-{secrets.token_hex(16)}")
        else:
            family, _, _, _, where = socket.getaddrinfo(self._where[0], 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family)
            listener.bind(where)
        listener.listen(socket.SOMAXCONN)
        listener.settimeout(0)
        return listener

    def _start(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(coroutine)
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # no descriptors are left
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(NONCE_TIMEOUT_S)
                continue
            if not _is_of_same_user(connection):
                connection.close()
                continue
            await self._unadmitted.acquire()  # the others wait in the listener's queue
            self._start(self._admit(connection))

    async def _admit(self, connection: socket.socket) -> None:
        """Hands a connection to whoever has offered it, else closes it."""
        connection.settimeout(0)
        offered = None
        try:
            async with asyncio.timeout(NONCE_TIMEOUT_S):
                nonce = await _receive(self._loop, connection, NONCE_BYTES)
                offered = self._offered.pop(nonce, None)
                if offered is not None:
                    await self._loop.sock_sendall(connection, _ADMITTED)
        except OSError:  # which TimeoutError is too
            offered = None
        finally:
            self._unadmitted.release()
            if offered is not None:
                _prepare(connection)
                offered.admit(connection)
            else:
                connection.close()


async def dial(
    loop: asyncio.AbstractEventLoop, offers: Sequence[agent_pb2.SocketOffer], kinds: Sequence[str]
) -> tuple[str, socket.socket] | None:
    """Connects to the first offer of these kinds.

    Args:
        loop: the event loop, on which this runs.
        offers: those of the other worker.
        kinds: UNIX, TCP or both: what may be used.

    Returns:
        The kind and the connection; None if there is none, for which the log says why.
    """
    for offer in offers:
        if offer.kind in kinds:
            try:
                return offer.kind, await _dial(loop, offer)
            except (OSError, ValueError) as error:
                log.info("no %s socket to %s, so gRPC is used: %s", offer.kind, offer.address, error)
    return None


async def _dial(loop: asyncio.AbstractEventLoop, offer: agent_pb2.SocketOffer) -> socket.socket:
    family: int = socket.AF_UNIX
    where: Any = f"\0{offer.address}"
    if offer.kind == TCP:
        host, _, port = offer.address.rpartition(":")
        found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
    connection = socket.socket(family)
    try:
        connection.settimeout(0)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, where)
            if not _is_of_same_user(connection):
                raise ConnectionError("the listener belongs to another user")
            await loop.sock_sendall(connection, offer.nonce)
            await _receive(loop, connection, len(_ADMITTED))
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


async def _receive(loop: asyncio.AbstractEventLoop, connection: socket.socket, count: int) -> bytes:
    """Receives exactly `count` bytes."""
    received = b""
    while len(received) < count:
        data = await loop.sock_recv(connection, count - len(received))
        if not data:
            raise ConnectionError("the connection was closed")
        received += data
    return received


def _is_of_same_user(connection: socket.socket) -> bool:
    """Returns whether the other end of a unix socket belongs to this process's user; True for other sockets."""
    if connection.family != socket.AF_UNIX:
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _prepare(connection: socket.socket) -> None:
    """Sets the options of a connected socket."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


@final
@dataclass(frozen=True, slots=True)
class SocketParts:
    """What the streams of an agent need for sockets.

    kinds: of sockets that may be used: UNIX, TCP or both; empty if gRPC carries the envelopes.
    listener: accepts connections.
    executor: its threads read the sockets.
    is_same_host: tells by the id of a worker whether it is on this host, in this network namespace.
    segments: returns what handles the frames about shared memory, on a new unix socket to the worker with this id.
    listeners: handle what comes by the stream and has nothing to do with envelopes.
    """

    kinds: Sequence[str]
    listener: SocketListener
    executor: Executor
    is_same_host: Callable[[int], bool]
    segments: Callable[[int], SegmentListener]
    listeners: Sequence["FrameListener"]

    def make(
        self,
        kind: str,
        connection: socket.socket,
        peer: WorkerInfo,
        listener: TransportListener,
        on_end: OnSocketEnd,
    ) -> EnvelopeSocket:
        """Returns what carries envelopes by a socket; it does not read before its `start`.

        Args:
            kind: UNIX or TCP.
            connection: the socket, connected to the peer.
            peer: the worker at the other end.
            listener: gets the envelopes.
            on_end: called with the reason when the socket ends.
        """
        segments = self.segments(peer.id) if kind == UNIX else None
        on_envelope, completion = partial(listener.on_envelope, peer), partial(listener.completion, peer)
        made = EnvelopeSocket(kind, connection, self.executor, on_envelope, on_end, segments, completion)
        if segments is not None:
            segments.connect(made)
        return made

    def on_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Has the listeners handle a frame of a peer."""
        for listener in self.listeners:
            listener.on_frame(peer, frame)
