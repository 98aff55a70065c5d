"""The socket that carries the envelopes of two workers in place of their gRPC stream, if they can connect one."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import final

from ...proto.v1 import agent_pb2
from .base import TransportListener
from .connection_log import log_connection
from .envelope_socket import CLOSED, EnvelopeSocket, FrameReader, PulseExchange
from .grpc_calls import StreamParts
from .outbox import Outbox
from .sockets import UNIX, OfferedSocket
from .tls_socket import AnySocket

__all__ = ["StreamSocket"]

READ_OUT_TIMEOUT_S = 5.0
"""Seconds in which something has to come of what a peer sent by the socket before its goodbye or its death."""


@final
class StreamSocket:
    """Offers, dials and watches the socket of one stream. Used on the event loop only."""

    def __init__(
        self,
        parts: StreamParts,
        peer: TransportListener,
        outbox: Outbox,
        on_broken: Callable[[str, Exception | None], None],
    ) -> None:
        """Has no socket yet. The outbox of the stream gets it, and the peer gets the envelopes.

        `on_broken` is called with the reason when the socket ends before the peer says that it does, and with the
        error if the peer has sent bytes that are no message.
        """
        self._parts = parts
        self._peer = peer
        self._worker = peer.info
        self._outbox = outbox
        self._on_broken = on_broken
        self._offered: OfferedSocket | None = None
        self._ended = asyncio.Event()

    def offer(self) -> OfferedSocket | None:
        """Makes an offer to the peer; returns None if there is nothing to offer."""
        self._offered = self._parts.listener.offer(self._worker, same_host=self._peer.is_on_this_host)
        self._outbox.is_held = self._offered is not None
        return self._offered

    def withdraw(self) -> None:
        """Withdraws the offer, if the peer has not said whether it uses it."""
        if self._offered is not None:
            self._offered.withdraw()
            self._offered = None
            self._outbox.is_held = False

    async def on_choice(self, kind: str) -> None:
        """Handles the answer to the offer. Raises TimeoutError if the peer says that it uses what there is not."""
        offered = self._offered
        if offered is not None and kind:
            connection = await offered.connection()
            if self._outbox.closed_reason is not None:
                connection.close()
            else:
                self._use(offered.offer.kind, connection)
            self._offered = None
            # Not before: the stream carries envelopes from now on, unless the socket does.
            self._outbox.is_held = False
        else:
            self.withdraw()

    def choose(
        self, offer: agent_pb2.SocketOffer, round_trip: float, on_chosen: Callable[[], None]
    ) -> asyncio.Task[None]:
        """Begins to connect the socket that the peer offers, while the stream carries all but envelopes.

        Calls `on_chosen` when what to tell the peer is in the outbox. A round trip takes so many seconds. The task
        is to be cancelled when the stream has ended.
        """
        self._outbox.is_held = True
        return self._parts.loop.create_task(self._choose(offer, round_trip, on_chosen))

    async def _choose(
        self, offer: agent_pb2.SocketOffer, round_trip: float, on_chosen: Callable[[], None]
    ) -> None:
        dialed = await self._parts.listener.dial(self._peer.member, offer, round_trip)
        if self._outbox.closed_reason is not None:
            if dialed is not None:
                dialed.close()
            return
        choice = agent_pb2.SocketChoice(kind=offer.kind if dialed is not None else "")
        if dialed is not None:
            try:
                self._use(offer.kind, dialed)
            except OSError as error:
                # The envelopes stay held until the stream has ended: the peer may have got some by the socket.
                self._handle_end(f"its connection broke: {error}" if str(error) else CLOSED)
                return
        if self._outbox.put_frame(agent_pb2.Frame(choice=choice).SerializeToString()):
            self._outbox.is_held = False
            on_chosen()
        else:
            self._on_broken("it does not read what it is sent", None)

    async def read_out(self, *, has_left: bool) -> None:
        """Waits until all that the peer has sent by the socket is read.

        If it has left, that is what it sent before its goodbye, as long as more comes. Else it may live and send
        without end, so this takes `READ_OUT_TIMEOUT_S` at most.
        """
        connection = self._outbox.socket
        while connection is not None and not self._ended.is_set():
            connection.take_heard()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), READ_OUT_TIMEOUT_S)
            if not has_left or not connection.take_heard():
                return

    def _use(self, kind: str, connection: AnySocket) -> None:
        """Sends and receives by a connected socket from now on. Raises OSError, and closes the socket then."""
        parts, used = self._parts, None
        try:
            segments, pulses = None, None
            if kind == UNIX:
                segments, pulses = self._peer.new_segments(), PulseExchange(parts.heartbeats.pulse)
            reader = FrameReader(self._peer.on_envelope, segments, pulses, parts.allocate)
            used = EnvelopeSocket(kind, connection, parts.executor, reader, self._on_end)
            if segments is not None:
                segments.connect(used.writer)
            self._outbox.use_socket(used)
            log_connection(parts, self._worker, connection)
            used.start()
            parts.unread.add(used)
        except BaseException:
            if used is None:
                connection.close()
            else:
                used.close()
                used.release()
            raise

    def _on_end(self, reason: str) -> None:
        """Handles the end of the socket. Called on a thread of the executor."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._parts.loop.call_soon_threadsafe(self._handle_end, reason)

    def _handle_end(self, reason: str) -> None:
        self._ended.set()
        malformed = None
        if (used := self._outbox.socket) is not None:
            self._parts.unread.discard(used)
            if (malformed := used.malformed) is not None:
                self._parts.handshake.audit.deny(used.name, malformed, worker=self._worker.name)
        if reason:
            self._on_broken(reason, malformed)
