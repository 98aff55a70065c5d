"""The channel for large payloads between hosts: bulk connections, beside those of the envelopes.

The connections from one worker to another, a bundle, are made when a large payload is sent. Until they are there,
where there can be none, and for a while after they broke, payloads go in chunks (chunked.py). A payload's envelope
names its bundle. So when a connection breaks, the receiver knows which payloads will not arrive, rejects their
messages, and the workers stay connected.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import math
import time
from functools import partial
from typing import ClassVar, final

from ....proto.v1 import agent_pb2
from ...contracts.messages import Buffer
from ...contracts.options import ChannelOptions
from ...execution.executor import Executor
from ...transports.bulk_sockets import BulkSockets
from ...transports.tls_socket import AnySocket
from ..base import PayloadLostError, SendingChannel, StartTransfer, check_size
from .buffers import BufferCache
from .receiving import ReceivingBundle
from .sending import SendingBundle

__all__ = ["BulkChannel"]

RETRY_AFTER_S = 10.0
"""Seconds after which connections are tried again that could not be made, or broke."""

IDLE_TIMEOUT_S = 10.0
"""Seconds after which memory is given back that was kept for payloads, if none has arrived."""

MAX_BUNDLES = 4
"""Bundles of one sender that a worker has at a time: more than one while the end of the others goes unnoticed."""

log = logging.getLogger(__name__)


@final
class BulkChannel:
    """The bulk connections of one agent, in both directions. A BulkListener."""

    name: ClassVar[str] = "bulk"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sockets: BulkSockets,
        executor: Executor,
        chunked: SendingChannel,
        options: ChannelOptions,
        cache: BufferCache,
    ) -> None:
        """Connects to nobody yet.

        Args:
            loop: the agent's event loop.
            sockets: makes the connections.
            executor: its threads read and write.
            chunked: carries payloads where there are no connections.
            options: the number of connections, and the size of payloads.
            cache: allocates the memory of payloads. Cleared when nothing has been received for a while, and closed
                with this channel.
        """
        self._loop = loop
        self._sockets = sockets
        self._executor = executor
        self._chunked = chunked
        self._options = options
        self._numbers = itertools.count(1)
        self._sending: dict[int, SendingBundle] = {}
        """By receiver."""
        self._next_attempt: dict[int, float] = {}
        """When connections to a receiver may be tried next, by the monotonic clock; never while they are."""
        self._attempts: dict[int, asyncio.Task[None]] = {}
        """By receiver. Used on the loop only."""
        self._receiving: dict[tuple[int, int], ReceivingBundle] = {}
        """By sender and number."""
        self._cache = cache
        self._idle_check = loop.call_later(IDLE_TIMEOUT_S, self._remove_idle)
        self._lost: dict[int, str] = {}
        """The lost peers, and why."""
        sockets.listen(self)

    def is_connected(self, peer: int) -> bool:
        """Returns whether payloads go to a peer by bulk connections."""
        return peer in self._sending

    # Sending.

    def queued_bytes(self, peer: int) -> int:
        """Returns the bytes for a peer that no connection has taken."""
        bundle = self._sending.get(peer)
        return bundle.queued_bytes if bundle is not None else 0

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer | None]:
        """Numbers the payload; starting the transfer sends the bytes without a copy."""
        bundle = self._sending.get(peer)
        if bundle is None:
            return self._send_chunked(peer, data)
        number = next(self._numbers)
        bulk = agent_pb2.BulkPayload(bundle=bundle.number, transfer_id=number, nbytes=data.nbytes)
        return agent_pb2.Payload(bulk=bulk), lambda: bundle.put(number, data)

    def _send_chunked(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer | None]:
        payload, start = self._chunked.send(peer, data)
        if start is None or not self._may_connect(peer):
            return payload, start

        def start_and_connect() -> None:
            start()
            self._loop.call_soon_threadsafe(self._connect, peer)

        return payload, start_and_connect

    def _may_connect(self, peer: int) -> bool:
        return self._sockets.has_socket(peer) and time.monotonic() >= self._next_attempt.get(peer, 0.0)

    def _connect(self, peer: int) -> None:
        if self._may_connect(peer) and peer not in self._sending and peer not in self._lost:
            self._next_attempt[peer] = math.inf
            self._attempts[peer] = self._loop.create_task(self._try_to_connect(peer))

    async def _try_to_connect(self, peer: int) -> None:
        bundle: SendingBundle | None = None
        try:
            number, connections = await self._sockets.connect(peer, self._options.bulk_connections)
            if connections:
                bundle = SendingBundle(number, connections, self._executor, partial(self._on_sending_end, peer))
        except Exception:
            log.exception("there are no bulk connections to worker %d, so its large payloads go by gRPC", peer)
        self._attempts.pop(peer, None)
        if bundle is None:
            self._next_attempt[peer] = time.monotonic() + RETRY_AFTER_S
            return
        self._sending[peer] = bundle
        bundle.start()

    def _on_sending_end(self, peer: int, reason: str) -> None:
        """Handles the end of the connections to a peer. Called on any thread."""
        self._next_attempt[peer] = time.monotonic() + RETRY_AFTER_S
        self._sending.pop(peer, None)
        log.info("a bulk connection to worker %d %s", peer, reason)

    # Receiving.

    def receive(self, peer: int, payload: agent_pb2.Payload) -> "concurrent.futures.Future[Buffer]":
        """Allocates memory for the payload, and returns a future of it. May be called on any thread."""
        announced = payload.bulk
        check_size(announced.nbytes, self._options)
        bundle = self._receiving.get((peer, announced.bundle))
        if bundle is not None:
            return bundle.expect(announced.transfer_id, announced.nbytes)
        if (reason := self._lost.get(peer)) is not None:
            lost: concurrent.futures.Future[Buffer] = concurrent.futures.Future()
            lost.set_exception(ConnectionError(reason))
            return lost
        raise PayloadLostError("its connection for large payloads is closed")

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Has the payload's parts read and dropped, so that they block no others. May be called on any thread."""
        if payload.bulk.nbytes and (bundle := self._receiving.get((peer, payload.bulk.bundle))) is not None:
            bundle.discard(payload.bulk.transfer_id, payload.bulk.nbytes)

    def on_offered(self, peer: int, bundle: int) -> bool:
        """Prepares for a bundle, whose number envelopes may name from now on."""
        count = sum(sender == peer for sender, _ in self._receiving)
        if peer in self._lost or (peer, bundle) in self._receiving or count >= MAX_BUNDLES:
            return False
        self._receiving[peer, bundle] = ReceivingBundle(
            self._executor,
            self._cache.allocate,
            lambda: self._receiving.pop((peer, bundle), None),
            partial(self._sockets.on_malformed, peer),
        )
        return True

    def on_connection(self, peer: int, bundle: int, connection: AnySocket) -> None:
        """Reads a connection from now on."""
        if (receiving := self._receiving.get((peer, bundle))) is None:
            connection.close()
            return
        receiving.add(connection)

    def on_not_connected(self, peer: int, bundle: int) -> None:
        """Drops a bundle."""
        if (receiving := self._receiving.get((peer, bundle))) is not None:
            receiving.fail(PayloadLostError("its connections for large payloads were not made"))

    def _remove_idle(self) -> None:
        self._cache.remove_idle()
        self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._remove_idle)

    # The rest of the contract of channels. Called on the loop.

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns False: other threads may be sending the payload."""
        return False

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Is never called."""

    def drop_peer(self, peer: int, reason: str) -> None:
        """Stops sending to a peer, and fails what is expected from it."""
        self._lost[peer] = reason
        self._drop(peer, reason, ConnectionError(reason))

    def drop_connection(self, peer: int, reason: str) -> None:
        """Does the same for a peer that may come back: then there are other connections to it."""
        self._drop(peer, reason, PayloadLostError(reason))
        self._next_attempt.pop(peer, None)

    def _drop(self, peer: int, reason: str, error: Exception) -> None:
        if (attempt := self._attempts.pop(peer, None)) is not None:
            attempt.cancel()
        if (sending := self._sending.get(peer)) is not None:
            sending.end(f"has ended: {reason}")
        for key, receiving in self._receiving.copy().items():
            if key[0] == peer:
                receiving.fail(error)

    async def close(self) -> None:
        """Ends all connections."""
        self._idle_check.cancel()
        self._cache.close()
        attempts = list(self._attempts.values())
        for peer in {*self._attempts, *self._sending, *(sender for sender, _ in self._receiving)}:
            self.drop_peer(peer, "this worker shuts down")
        await asyncio.gather(*attempts, return_exceptions=True)
        await self._sockets.close()
