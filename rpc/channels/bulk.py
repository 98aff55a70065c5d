"""The channel for large payloads between hosts: bulk connections, beside those of the envelopes.

The connections from one worker to another, a bundle, are made when a large payload is sent. Until they are there,
where there can be none, and for a while after they broke, payloads go in chunks (chunked.py). A payload's envelope
names its bundle. So when a connection breaks, the receiver knows which payloads will not arrive, rejects their
messages, and the workers stay connected.
"""

import asyncio
import itertools
import logging
import math
import time
from functools import partial
from typing import ClassVar, final

from ...proto.v1 import agent_pb2
from ..transports.base import Transport
from ..transports.tls_socket import AnySocket
from .base import Arriving, ChannelDependencies, ChannelPeer, PayloadLostError, StartTransfer, check_size
from .buffers import BufferCache
from .bulk_connections import ReceivingBundle, SendingBundle
from .chunked import ChunkedChannel

__all__ = ["BulkChannel"]

RETRY_AFTER_S = 10.0
"""Seconds after which connections are tried again that could not be made, or broke."""

MAX_BUNDLES = 4
"""Bundles of one sender that a worker has at a time: more than one while the end of the others goes unnoticed."""

log = logging.getLogger(__name__)


@final
class BulkChannel:
    """The bulk connections to one worker, and from it. A BulkListener."""

    name: ClassVar[str] = "bulk"

    def __init__(
        self, peer: ChannelPeer, dependencies: ChannelDependencies, cache: BufferCache, chunked: ChunkedChannel
    ) -> None:
        """Connects to nobody yet. Chunks carry payloads where there are no connections."""
        self._peer = peer
        self._loop, self._executor, self._sockets = dependencies.loop, dependencies.executor, dependencies.sockets
        self._options = dependencies.options.channels
        self._cache = cache
        self._chunked = chunked
        self._numbers = itertools.count(1)
        self.sending: SendingBundle | None = None
        self._next_attempt = 0.0
        """When connections may be tried next, by the monotonic clock; never while they are."""
        self._attempt: asyncio.Task[None] | None = None
        """Used on the loop only."""
        self.receiving: dict[int, ReceivingBundle] = {}
        """By number."""

    @property
    def is_connected(self) -> bool:
        """Whether payloads go to the worker by bulk connections."""
        return self.sending is not None

    # Sending.

    @property
    def queued_bytes(self) -> int:
        """The bytes that no connection has taken."""
        bundle = self.sending
        return bundle.queued_bytes if bundle is not None else 0

    def send(self, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer]:
        """Numbers the payload; starting the transfer sends the bytes without a copy."""
        bundle = self.sending
        if bundle is None:
            return self._send_chunked(data)
        number = next(self._numbers)
        bulk = agent_pb2.BulkPayload(bundle=bundle.number, transfer_id=number, nbytes=data.nbytes)
        return agent_pb2.Payload(bulk=bulk), lambda _: bundle.put(number, data)

    def _send_chunked(self, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer]:
        payload, start = self._chunked.send(data)
        if not self._may_connect():
            return payload, start

        def start_and_connect(transport: Transport) -> None:
            start(transport)
            self._loop.call_soon_threadsafe(self._connect)

        return payload, start_and_connect

    def _may_connect(self) -> bool:
        return self._peer.has_socket and time.monotonic() >= self._next_attempt

    def _connect(self) -> None:
        if self._may_connect() and self.sending is None and self._peer.end is None:
            self._next_attempt = math.inf
            self._attempt = self._sockets.start(self._try_to_connect())

    async def _try_to_connect(self) -> None:
        bundle: SendingBundle | None = None
        try:
            number, connections = await self._sockets.connect(self._peer, self._options.bulk_connections)
            if connections:
                bundle = SendingBundle(number, connections, self._executor, self._on_sending_end)
        except Exception:
            name = self._peer.info.name
            log.exception("there are no bulk connections to worker %s, so its large payloads go by gRPC", name)
        self._attempt = None
        if bundle is None:
            self._next_attempt = time.monotonic() + RETRY_AFTER_S
            return
        self.sending = bundle
        bundle.start()

    def _on_sending_end(self, reason: str) -> None:
        """Handles the end of the connections. Called on any thread."""
        self._next_attempt = time.monotonic() + RETRY_AFTER_S
        self.sending = None
        log.info("a bulk connection to worker %s %s", self._peer.info.name, reason)

    # Receiving.

    def receive(self, payload: agent_pb2.Payload) -> Arriving:
        """Allocates memory for the payload, and returns a future of it. May be called on any thread."""
        announced = payload.bulk
        check_size(announced.nbytes, self._options)
        bundle = self.receiving.get(announced.bundle)
        if bundle is not None:
            return bundle.expect(announced.transfer_id, announced.nbytes)
        if (end := self._peer.end) is not None:
            lost = Arriving()
            lost.set_exception(ConnectionError(end.reason))
            return lost
        raise PayloadLostError("its connection for large payloads is closed")

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Has the payload's parts read and dropped, so that they block no others. May be called on any thread."""
        if payload.bulk.nbytes and (bundle := self.receiving.get(payload.bulk.bundle)) is not None:
            bundle.discard(payload.bulk.transfer_id, payload.bulk.nbytes)

    def on_frame(self, frame: agent_pb2.Frame) -> None:
        """Handles the request or the offer in a frame. Called on the loop."""
        if frame.HasField("bulk_request"):
            self._sockets.on_request(self._peer, frame.bulk_request, self)
        if frame.HasField("bulk_offer"):
            self._sockets.on_offer(self._peer, frame.bulk_offer)

    def on_offered(self, bundle: int) -> bool:
        """Prepares for a bundle, whose number envelopes may name from now on."""
        if self._peer.end is not None or bundle in self.receiving or len(self.receiving) >= MAX_BUNDLES:
            return False
        self.receiving[bundle] = ReceivingBundle(
            self._executor,
            self._cache.allocate,
            lambda: self.receiving.pop(bundle, None),
            partial(self._sockets.on_malformed, self._peer),
        )
        return True

    def on_connection(self, bundle: int, connection: AnySocket) -> None:
        """Reads a connection from now on."""
        if (receiving := self.receiving.get(bundle)) is None:
            connection.close()
            return
        receiving.add(connection)

    def on_not_connected(self, bundle: int) -> None:
        """Drops a bundle."""
        if (receiving := self.receiving.get(bundle)) is not None:
            receiving.fail(PayloadLostError("its connections for large payloads were not made"))

    # The end. Called on the loop.

    def drop(self, error: Exception) -> None:
        """Ends all connections, and fails what is expected. There may be others if the worker is not lost."""
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        if (sending := self.sending) is not None:
            sending.end(f"has ended: {error}")
        for receiving in list(self.receiving.values()):
            receiving.fail(error)
        self._next_attempt = 0.0
