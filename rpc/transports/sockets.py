"""How two workers get sockets beside their gRPC stream: unix sockets on one host, TCP between hosts.

The worker that accepts the stream offers an address and a nonce of 32 random bytes in its Welcome; the other one
dials the address and begins with the nonce. So whoever may use the stream may use the socket, and nobody else.
Where there are credentials, TCP connections have TLS (tls_socket.py), inside of which the nonce is said, and each
end demands that the other one's certificate is for the worker whose stream it is.
Unix sockets have names in the abstract namespace, of which nothing is left however a process ends; both ends check
that the other one belongs to the same user. The listeners are made when they are first needed.

One socket carries the envelopes. Those of a bundle carry large payloads: the sender asks for them by the gRPC
stream, when it first has such a payload; the receiver offers them, and the sender dials. So connections are made
in the direction in which the payloads go, as for chunks.
"""

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import socket
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, final

from ...net.addresses import LOOPBACK, PortRange, format_address, is_tcp_address
from ...net.inheritance import ABSTRACT_PREFIX, note_listener, note_peer
from ...net.security import Audit, Identity, printable, worker_host_name
from ...net.socket_peers import MAX_ROUND_TRIP_S, address_of_peer, has_left, is_of_same_user, round_trip_s
from ...proto.v1 import agent_pb2
from ..contracts.options import MAX_BULK_CONNECTIONS
from ..contracts.worker import Member, WorkerInfo
from .tls_socket import AnySocket, TlsSocket

__all__ = [
    "TCP",
    "UNIX",
    "BulkListener",
    "BulkPeer",
    "BulkSockets",
    "OfferedSocket",
    "SocketListener",
    "tcp_socket",
]

UNIX = "unix"
TCP = "tcp"

_UNIX_NAME = re.compile(rf"{ABSTRACT_PREFIX}[0-9a-f]{{32}}", re.ASCII)
"""The names of unix sockets, without the null byte in front."""

NONCE_BYTES = 32
NONCE_TIMEOUT_S = 2.0
"""Seconds that a connection may take to say its nonce, the handshake of TLS included, besides two round trips."""

CONNECT_TIMEOUT_S = 5.0
"""Seconds that the offered address may take to accept a connection, besides DIAL_ROUND_TRIPS."""

DIAL_ROUND_TRIPS = 4
"""Round trips in which a connection is made: one each for TCP, TLS and the nonce, and one for a lost packet."""

OFFER_TIMEOUT_S = CONNECT_TIMEOUT_S + (DIAL_ROUND_TRIPS + 1) * MAX_ROUND_TRIP_S
"""Seconds after which offers are void whose connections have not been made. They cost little but a number."""

MAX_UNADMITTED = 64
"""Connections that may not have said their nonce yet; further ones wait to be accepted."""

KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""How the kernel finds out that the other host has lost power or network: after 20 + 4 * 5 idle seconds."""

_ADMITTED = b"\x01"

log = logging.getLogger(__name__)


@final
class OfferedSocket:
    """A connection that another worker may make, once. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: str, address: str, worker: WorkerInfo) -> None:
        self.worker = worker
        """The worker that may make it."""
        self.offer = agent_pb2.SocketOffer(kind=kind, address=address, nonce=secrets.token_bytes(NONCE_BYTES))
        """The offer to tell the other worker."""
        self._connection: asyncio.Future[AnySocket] = loop.create_future()

    def admit(self, connection: AnySocket) -> None:
        """Takes over the connection that has said the nonce."""
        if self._connection.done():
            connection.close()
        else:
            self._connection.set_result(connection)

    async def connection(self, seconds: float = NONCE_TIMEOUT_S) -> AnySocket:
        """Waits for the connection; by default as long as it takes if the other worker says that it has made it.

        Raises TimeoutError.
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

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        kinds: Sequence[str],
        identity: Identity | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Listens nowhere yet. TCP connections have TLS if there is an identity, which this worker shows."""
        self._loop = loop
        self.audit = audit or Audit("")
        self.kinds = kinds
        """UNIX, TCP or both: what may be offered."""
        self._identity = identity
        self._where, self._ports = ("", ""), PortRange()
        self._listeners: dict[str, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unadmitted = asyncio.Semaphore(MAX_UNADMITTED)
        self._offered: weakref.WeakValueDictionary[bytes, OfferedSocket] = weakref.WeakValueDictionary()
        """The connections that are offered and have not been made, by nonce. Who has made an offer keeps it."""

    def set_address(self, bind: str, advertised: str, ports: PortRange) -> None:
        """Sets the address and ports that TCP connections are accepted at, and the address that others dial."""
        self._where, self._ports = (bind, advertised), ports

    def offer(self, worker: WorkerInfo, *, same_host: bool) -> OfferedSocket | None:
        """Offers a connection to a worker, as long as the caller keeps the offer; None if there is none to offer.

        Two workers are on the same host if they are in one network namespace, too.
        """
        kind = UNIX if same_host and UNIX in self.kinds else TCP
        if kind not in self.kinds:
            return None
        try:
            address = self._listen(kind)
        except OSError as error:
            log.warning("cannot listen on a %s socket, so gRPC carries the calls: %s", kind, error)
            return None
        offered = OfferedSocket(self._loop, kind, address, worker)
        self._offered[offered.offer.nonce] = offered
        return offered

    async def dial(
        self, member: Member, offer: agent_pb2.SocketOffer, round_trip: float = 0.0
    ) -> AnySocket | None:
        """Connects to what a worker offers, to which a round trip takes so many seconds.

        By TCP, no other host than the worker's own is dialed. If there is no connection, the log says why.
        """
        until = self._loop.time() + CONNECT_TIMEOUT_S + DIAL_ROUND_TRIPS * round_trip
        while offer.kind in self.kinds:
            began = self._loop.time()
            try:
                async with asyncio.timeout_at(until):
                    return await _dial(self._loop, offer, member, self._identity)
            except (OSError, ValueError) as error:
                if isinstance(error, ConnectionError) and began + NONCE_TIMEOUT_S < self._loop.time() < until:
                    continue  # one of the processes was held up; the offer stands
                where = printable(offer.address)
                log.info("no %s socket to %s, so gRPC is used: %s", offer.kind, where, printable(error))
                break
        return None

    async def close(self) -> None:
        """Stops listening, and offers nothing any more; connections that were not asked for are closed."""
        self.kinds = ()
        self._offered.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners.values():
            listener.close()

    def _listen(self, kind: str) -> str:
        """Returns the address of a listener, which is made if there is none."""
        if kind not in self._listeners:
            self._listeners[kind] = self._make_listener(kind)
            self.start(self._accept(kind, self._listeners[kind]))
        name = self._listeners[kind].getsockname()
        if kind == UNIX:
            return str(name[1:].decode())
        return format_address(self._where[1], name[1])

    def _make_listener(self, kind: str) -> socket.socket:
        if kind == UNIX:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{ABSTRACT_PREFIX}{secrets.token_hex(16)}")
        else:
            listener = self._ports.listen(self._where[0])
            host, port = listener.getsockname()[:2]
            note_listener(listener, port, host)
        listener.listen(socket.SOMAXCONN)
        listener.settimeout(0)
        return listener

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine that makes connections, or waits for them, at most until `close`."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, kind: str, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # no descriptors are left
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(NONCE_TIMEOUT_S)
                continue
            peer = address_of_peer(connection)
            self.audit.connect(kind, peer)
            if not is_of_same_user(connection):
                self.audit.deny(kind, "it belongs to another user", peer=peer)
                connection.close()
                continue
            if self._unadmitted.locked():  # the others wait in the listener's queue
                self.audit.limit(kind, f"MAX_UNADMITTED={MAX_UNADMITTED}", peer=peer, refuses=False)
            await self._unadmitted.acquire()
            self.start(self._admit(kind, connection, peer))

    async def _admit(self, kind: str, connection: socket.socket, peer: str) -> None:
        """Hands a connection to whoever has offered it, else closes it."""
        connection.settimeout(0)
        admitted: AnySocket = connection
        names = None
        offered = None
        try:
            async with asyncio.timeout(NONCE_TIMEOUT_S + 2 * round_trip_s(connection)):
                if self._identity is not None and connection.family != socket.AF_UNIX:
                    admitted = TlsSocket(connection, self._identity.server_context(), None)
                    names = await admitted.handshake(self._loop)
                nonce = await _receive(self._loop, admitted, NONCE_BYTES)
                offered = self._offered.pop(nonce, None)
                if offered is None:
                    raise ConnectionRefusedError("its nonce is of no offer, or of one that has expired")
                if names is not None and worker_host_name(offered.worker.name) not in names:
                    raise ConnectionRefusedError(f"its certificate is not for worker {offered.worker.name!r}")
                admitted.send(_ADMITTED)
            self.audit.authenticate(kind, peer, offered.worker.name)
        except TimeoutError:
            self.audit.deny(kind, f"it has not said its nonce within {NONCE_TIMEOUT_S:g} s", peer=peer)
            offered = None
        except OSError as error:
            if has_left(error):
                log.info("a connection ended before it was let in: %s", error)
            else:
                self.audit.deny(kind, error, peer=peer)
            offered = None
        finally:
            self._unadmitted.release()
            if offered is not None:
                _prepare(connection)
                offered.admit(admitted)
            else:
                connection.close()


class BulkPeer(Protocol):
    """The worker at the other end of bulk connections."""

    info: WorkerInfo
    member: Member

    @property
    def is_on_this_host(self) -> bool:
        """Whether it is on this host, in this network namespace."""

    def send_frame(self, frame: agent_pb2.Frame) -> None:
        """Sends a frame to it by the gRPC stream."""


class BulkListener(Protocol):
    """Receives the connections that one peer has asked for. Its methods are called on the event loop."""

    def on_offered(self, bundle: int) -> bool:
        """Handles a request of the peer; returns whether it gets its connections."""

    def on_connection(self, bundle: int, connection: AnySocket) -> None:
        """Takes over a connection of a bundle, of which `on_offered` has been told."""

    def on_not_connected(self, bundle: int) -> None:
        """Handles a bundle that nothing could be offered for, or whose connections were not all made in time."""


@final
class BulkSockets:
    """Makes bundles of connections, and offers them to peers. Used on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sockets: SocketListener) -> None:
        """Has made no connections yet."""
        self._loop = loop
        self._sockets = sockets
        self._numbers = itertools.count(1)
        self._requests: dict[int, tuple[BulkPeer, asyncio.Future[Sequence[agent_pb2.SocketOffer]]]] = {}
        """Who is to offer connections, and its offers, by number of the bundle."""

    async def connect(self, peer: BulkPeer, count: int) -> tuple[int, list[AnySocket]]:
        """Asks a peer for so many connections to it, and makes them; none if not all of them can be made.

        Returns the number of the bundle, and its connections.
        """
        bundle = next(self._numbers)
        request, asked = agent_pb2.BulkRequest(bundle=bundle, connections=count), self._loop.time()
        offered = self._loop.create_future()
        self._requests[bundle] = peer, offered
        try:
            peer.send_frame(agent_pb2.Frame(bulk_request=request))
            offers = await offered
        finally:
            del self._requests[bundle]
        round_trip = self._loop.time() - asked
        return bundle, await self._dial(peer, offers, round_trip) if len(offers) == count else []

    async def _dial(
        self, peer: BulkPeer, offers: Sequence[agent_pb2.SocketOffer], round_trip: float
    ) -> list[AnySocket]:
        """Makes the connections that are offered, all at the same time; returns none if one cannot be made."""
        connections: list[AnySocket] = []

        async def dial(offer: agent_pb2.SocketOffer) -> None:
            if (connection := await self._sockets.dial(peer.member, offer, round_trip)) is not None:
                connections.append(connection)

        made: list[AnySocket] = []
        try:
            async with asyncio.TaskGroup() as group:
                for offer in offers:
                    group.create_task(dial(offer))
            if len(connections) == len(offers):
                made, connections = connections, made
        finally:
            for connection in connections:
                connection.close()
        return made

    def on_request(self, peer: BulkPeer, request: agent_pb2.BulkRequest, listener: BulkListener) -> None:
        """Handles the request of a peer, whose listener gets the connections."""
        bundle, offered = request.bundle, []
        is_valid = bool(self._sockets.kinds) and 0 < request.connections <= MAX_BULK_CONNECTIONS
        if is_valid and listener.on_offered(bundle):
            offered = self._offer(peer, request.connections)
            self._sockets.start(self._accept(bundle, offered, listener))
        offers = [each.offer for each in offered]
        peer.send_frame(agent_pb2.Frame(bulk_offer=agent_pb2.BulkOffer(bundle=bundle, sockets=offers)))

    def on_offer(self, peer: BulkPeer, offer: agent_pb2.BulkOffer) -> None:
        """Handles the offer of a peer."""
        asked, offered = self._requests.get(offer.bundle, (None, None))
        if offered is not None and asked is peer and not offered.done():
            offered.set_result(offer.sockets)

    def on_malformed(self, peer: BulkPeer, error: Exception) -> None:
        """Records that a peer has sent bytes on a bulk connection that are no payload. Called on any thread."""
        self._sockets.audit.deny("bulk", error, worker=peer.info.name)

    def _offer(self, peer: BulkPeer, count: int) -> list[OfferedSocket]:
        """Returns this many offers, or none."""
        same_host = peer.is_on_this_host
        offered = [self._sockets.offer(peer.info, same_host=same_host) for _ in range(count)]
        return [each for each in offered if each is not None] if None not in offered else []

    async def _accept(self, bundle: int, offered: list[OfferedSocket], listener: BulkListener) -> None:
        """Waits for the connections that have been offered."""
        is_complete = bool(offered)
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                while offered:
                    connection = await offered[0].connection(OFFER_TIMEOUT_S)
                    del offered[0]
                    listener.on_connection(bundle, connection)
        except TimeoutError:
            is_complete = False
        finally:
            for each in offered:
                each.withdraw()
        if not is_complete:
            listener.on_not_connected(bundle)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine that makes connections, at most until no sockets are offered any more."""
        return self._sockets.start(coroutine)


def tcp_socket(address: str) -> tuple[socket.socket, tuple[str, int]]:
    """Returns an unconnected socket for a numeric address and port, and what to connect it to."""
    host, _, port = address.rpartition(":")
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.settimeout(0)
    return connection, (host.strip("[]"), int(port))


async def _dial(
    loop: asyncio.AbstractEventLoop, offer: agent_pb2.SocketOffer, member: Member, identity: Identity | None
) -> AnySocket:
    # A peer shall not have this worker connect, and say something, to other programs.
    is_valid = is_tcp_address(offer.address) if offer.kind == TCP else bool(_UNIX_NAME.fullmatch(offer.address))
    if not is_valid or len(offer.nonce) != NONCE_BYTES:
        raise ValueError("it is no socket of a worker")
    where: Any = f"\0{offer.address}"
    if offer.kind == TCP:
        connection, where = tcp_socket(offer.address)
        if where[0] != (host := LOOPBACK if member.has_unix_socket else member.host):
            connection.close()
            raise ValueError(f"it is not on the worker's host, {host}")
        note_peer(connection, where[1], where[0])
    else:
        connection = socket.socket(socket.AF_UNIX)
    dialed: AnySocket = connection
    try:
        connection.settimeout(0)
        await loop.sock_connect(connection, where)
        if not is_of_same_user(connection):
            raise ConnectionError("the listener belongs to another user")
        if identity is not None and offer.kind == TCP:
            dialed = TlsSocket(connection, identity.client_context(), worker_host_name(member.info.name))
            await dialed.handshake(loop)
        dialed.send(offer.nonce)  # for which there is room in a new connection
        await _receive(loop, dialed, len(_ADMITTED))
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return dialed


async def _receive(loop: asyncio.AbstractEventLoop, connection: AnySocket, count: int) -> bytes:
    """Receives exactly `count` bytes."""
    received = b""
    while len(received) < count:
        left = count - len(received)
        if isinstance(connection, TlsSocket):
            data = await connection.receive_soon(loop, left)
        else:
            data = await loop.sock_recv(connection, left)
        if not data:
            raise ConnectionError("the connection was closed")
        received += data
    return received


def _prepare(connection: socket.socket) -> None:
    """Sets the options of a connected socket."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
