"""How two workers get the sockets by which one of them sends the other large payloads.

The sender asks for them by the gRPC stream, when it first has such a payload; the receiver offers sockets, each
with a nonce, as it does for envelopes (sockets.py); the sender dials them. So connections are made in the
direction in which the payloads go, as for chunks.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, final

from ...net.socket_peers import MAX_ROUND_TRIP_S
from ...proto.v1 import agent_pb2
from ..contracts.options import MAX_BULK_CONNECTIONS
from ..contracts.worker import Member, WorkerInfo
from .sockets import CONNECT_TIMEOUT_S, DIAL_ROUND_TRIPS, OfferedSocket, SocketListener
from .tls_socket import AnySocket

__all__ = ["BulkListener", "BulkPeer", "BulkSockets"]

OFFER_TIMEOUT_S = CONNECT_TIMEOUT_S + (DIAL_ROUND_TRIPS + 1) * MAX_ROUND_TRIP_S
"""Seconds after which offers are void whose connections have not been made. They cost little but a number."""


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
