"""How two workers get the sockets by which one of them sends the other large payloads.

The sender asks for them by the gRPC stream, when it first has such a payload; the receiver offers sockets, each
with a nonce, as it does for envelopes (sockets.py); the sender dials them. So connections are made in the
direction in which the payloads go, as for chunks.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, final

from ...c10d.round_trips import MAX_ROUND_TRIP_S
from ...proto.v1 import agent_pb2
from ..contracts.options import MAX_BULK_CONNECTIONS
from ..contracts.worker import WorkerInfo
from .sockets import CONNECT_TIMEOUT_S, DIAL_ROUND_TRIPS, OfferedSocket, SocketListener
from .tls_socket import AnySocket

__all__ = ["BulkListener", "BulkSockets"]

OFFER_TIMEOUT_S = CONNECT_TIMEOUT_S + (DIAL_ROUND_TRIPS + 1) * MAX_ROUND_TRIP_S
"""Seconds after which offers are void whose connections have not been made. They cost little but a number."""


class BulkListener(Protocol):
    """Receives the connections that peers have asked for. Its methods are called on the event loop."""

    def on_offered(self, peer: int, bundle: int) -> bool:
        """Handles a request of a peer; returns whether it gets its connections."""

    def on_connection(self, peer: int, bundle: int, connection: AnySocket) -> None:
        """Takes over a connection of a bundle, of which `on_offered` has been told."""

    def on_not_connected(self, peer: int, bundle: int) -> None:
        """Handles a bundle that nothing could be offered for, or whose connections were not all made in time."""


@final
class BulkSockets:
    """Makes bundles of connections, and offers them to peers. Used on the event loop only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: SocketListener,
        worker_of: Callable[[int], WorkerInfo],
        is_same_host: Callable[[int], bool],
        has_socket: Callable[[int], bool],
        send: Callable[[int, agent_pb2.Frame], None],
    ) -> None:
        """Offers nothing before `listen`.

        Args:
            loop: the event loop.
            sockets: makes and accepts connections, of the kinds that may be used.
            worker_of: returns a worker by its id.
            is_same_host: tells by the id of a worker whether it is on this host, in this network namespace.
            has_socket: tells by the id of a worker whether its envelopes travel by a socket beside the gRPC
                stream; only then are there bulk connections.
            send: sends a frame to a peer by the gRPC stream.
        """
        self.has_socket = has_socket
        self._loop = loop
        self._sockets = sockets
        self._worker_of = worker_of
        self._is_same_host = is_same_host
        self._send = send
        self._listener: BulkListener | None = None
        self._numbers = itertools.count(1)
        self._requests: dict[tuple[int, int], asyncio.Future[Sequence[agent_pb2.SocketOffer]]] = {}
        """The offers that are awaited, by peer and number of the bundle."""
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, listener: BulkListener) -> None:
        """Gives a listener the connections that peers ask for from now on."""
        self._listener = listener

    async def connect(self, peer: int, count: int) -> tuple[int, list[AnySocket]]:
        """Asks a peer for connections, and makes them.

        Args:
            peer: the receiver of what is to be sent.
            count: the number of connections.

        Returns:
            The number of the bundle, and its connections; none if not all of them can be made.
        """
        bundle = next(self._numbers)
        request, asked = agent_pb2.BulkRequest(bundle=bundle, connections=count), self._loop.time()
        offered = self._requests[peer, bundle] = self._loop.create_future()
        try:
            self._send(peer, agent_pb2.Frame(bulk_request=request))
            offers = await offered
        finally:
            del self._requests[peer, bundle]
        round_trip = self._loop.time() - asked
        return bundle, await self._dial(peer, offers, round_trip) if len(offers) == count else []

    async def _dial(
        self, peer: int, offers: Sequence[agent_pb2.SocketOffer], round_trip: float
    ) -> list[AnySocket]:
        """Makes the connections that are offered, all at the same time; returns none if one cannot be made."""
        connections: list[AnySocket] = []

        async def dial(offer: agent_pb2.SocketOffer) -> None:
            if (dialed := await self._sockets.dial(self._worker_of(peer), [offer], round_trip)) is not None:
                connections.append(dialed[1])

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

    def on_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Handles the request or the offer in a frame from a peer."""
        if frame.HasField("bulk_request"):
            self._on_request(peer, frame.bulk_request)
        if frame.HasField("bulk_offer"):
            offered = self._requests.get((peer, frame.bulk_offer.bundle))
            if offered is not None and not offered.done():
                offered.set_result(frame.bulk_offer.sockets)

    def on_malformed(self, peer: int, error: Exception) -> None:
        """Records that a peer has sent bytes on a bulk connection that are no payload. Called on any thread."""
        self._sockets.audit.deny("bulk", error, worker=self._worker_of(peer).name)

    async def close(self) -> None:
        """Offers nothing any more."""
        self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_request(self, peer: int, request: agent_pb2.BulkRequest) -> None:
        bundle, offered = request.bundle, []
        listener = self._listener
        is_valid = bool(self._sockets.kinds) and 0 < request.connections <= MAX_BULK_CONNECTIONS
        if listener is not None and is_valid and listener.on_offered(peer, bundle):
            offered = self._offer(peer, request.connections)
            self._start(self._accept(peer, bundle, offered, listener))
        offers = [each.offer for each in offered]
        self._send(peer, agent_pb2.Frame(bulk_offer=agent_pb2.BulkOffer(bundle=bundle, sockets=offers)))

    def _offer(self, peer: int, count: int) -> list[OfferedSocket]:
        """Returns this many offers, or none."""
        worker, same_host = self._worker_of(peer), self._is_same_host(peer)
        offered = [self._sockets.offer(worker, same_host=same_host) for _ in range(count)]
        return [each for each in offered if each is not None] if None not in offered else []

    async def _accept(self, peer: int, bundle: int, offered: list[OfferedSocket], listener: BulkListener) -> None:
        """Waits for the connections that have been offered."""
        is_complete = bool(offered)
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                while offered:
                    connection = await offered[0].connection(OFFER_TIMEOUT_S)
                    del offered[0]
                    listener.on_connection(peer, bundle, connection)
        except TimeoutError:
            is_complete = False
        finally:
            for each in offered:
                each.withdraw()
        if not is_complete:
            listener.on_not_connected(peer, bundle)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
