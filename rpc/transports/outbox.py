"""What carries the envelopes of one gRPC stream: a queue, until it is known; then a socket, or the stream itself.

The worker that accepts the stream offers a socket; the other one dials it, and tells by the stream whether it uses
it. Meanwhile the stream carries all but envelopes, which wait.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from ...proto.v1 import agent_pb2
from ..execution.executor import Executor
from ..wire.parsing import bytes_field, embed
from .base import Connecting, TransportClosedError, TransportListener
from .connection_log import log_connection
from .envelope_socket import CLOSED, EnvelopeSocket, FrameReader, PulseExchange
from .grpc_endpoint import Handshake
from .liveness import Heartbeats
from .socket_frames import BEGINNING_BYTES
from .sockets import UNIX, OfferedSocket, SocketListener
from .tls_socket import AnySocket

__all__ = ["Outbox", "StreamParts"]

FRAME_BYTES = 1 << 20
"""Maximum bytes of envelopes that share a frame; a larger envelope has a frame of its own."""

MAX_FRAMES = 1 << 14
"""Frames without envelopes that are queued, at most. A worker that reads is sent some for each connection, and for
each segment of device memory."""

READ_OUT_TIMEOUT_S = 5.0
"""Seconds in which something has to come of what a peer sent by the socket before its goodbye or its death."""


@final
@dataclass(frozen=True, slots=True)
class StreamParts:
    """What the streams of one agent share.

    loop: the event loop.
    handshake: makes and checks hellos.
    heartbeats: watches the connections.
    listener: offers and dials the sockets beside the streams.
    executor: its threads read these.
    allocate: returns memory of so many bytes for what follows envelopes. Raises MemoryError if there is none.
    unread: the sockets that have not been read to their end, of streams that have ended, too.
    """

    loop: asyncio.AbstractEventLoop
    handshake: Handshake
    heartbeats: Heartbeats
    listener: SocketListener
    executor: Executor
    allocate: Callable[[int], memoryview]
    unread: set[EnvelopeSocket] = field(default_factory=set)

    def release(self) -> None:
        """Releases the sockets that no thread reads any more. Called when the executor has ended."""
        for connection in list(self.unread):
            connection.release()


@final
class Outbox:
    """The envelopes for one peer, and the socket that they go by if there is one.

    `put`, `withdraw` and `queued_bytes` are used on any thread, all else on the event loop.
    """

    def __init__(
        self,
        parts: StreamParts,
        peer: TransportListener,
        address: str,
        on_chosen: Callable[[], None],
        on_broken: Callable[[str, Exception | None], None],
    ) -> None:
        """Has no socket yet.

        Args:
            parts: what the streams of the agent share.
            peer: gets the envelopes that come by the socket.
            address: that of the peer's gRPC server, for the log.
            on_chosen: called when the two workers have chosen what carries the envelopes, after an offer.
            on_broken: called with the reason when the socket ends before the peer says that it does, and with the
                error if the peer has sent bytes that are no message.
        """
        self._parts = parts
        self._peer = peer
        self._address = address
        self._on_chosen = on_chosen
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        """Envelopes."""
        self._frames: deque[bytes] = deque()
        """Frames without envelopes. They go by the stream, also if there is a socket."""
        self.is_held = False
        """Whether envelopes wait, because it is not known yet whether there will be a socket."""
        self.socket: EnvelopeSocket | None = None
        """The socket that carries the envelopes in place of the gRPC stream."""
        self.closed_reason: str | None = None
        """The reason that nothing can be sent any more; None until then."""
        self.connected = Connecting()
        """Done when it is known what carries the envelopes: a socket, the stream, or nothing any more."""
        self._offered: OfferedSocket | None = None
        self._has_socket_ended = asyncio.Event()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the envelopes that are queued, here or in front of the socket."""
        with self._lock:
            queued = sum(map(len, self._queue))
        return queued + (self.socket.writer.queued_bytes if self.socket is not None else 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued that the stream may carry now."""
        return not self._frames and (self.is_held or not self._queue)

    def put(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> EnvelopeSocket | None:
        """Queues an envelope with what is attached to it; does not if there is a socket by now, and returns that.

        Raises TransportClosedError if the connection is closed.
        """
        with self._lock:
            if self.socket is None:
                if self.closed_reason is not None:
                    raise TransportClosedError(self.closed_reason)
                self._queue.append(embed(envelope, attached))
            return self.socket

    def put_frame(self, frame: bytes) -> bool:
        """Queues a frame without envelopes, in front of the envelopes; returns False if there are too many."""
        if len(self._frames) >= MAX_FRAMES:
            return False
        self._frames.append(frame)
        return True

    def withdraw(self, beginning: bytes) -> bool:
        """Removes an envelope from the queue, or from that of the socket, if it is there: see Transport."""
        with self._lock:
            for index, envelope in enumerate(self._queue):
                if envelope.startswith(beginning):
                    del self._queue[index]
                    return True
        return self.socket is not None and self.socket.writer.withdraw(beginning)

    def next_frame(self) -> bytes:
        """Takes a frame for the stream, up to FRAME_BYTES, but at least one envelope; empty if there is none."""
        if self._frames:
            return self._frames.popleft()
        if self.is_held:
            return b""
        self._set_connected(self._address)
        with self._lock:
            taken: list[bytes] = []
            size = 0
            while self._queue and not (taken and size + len(self._queue[0]) > FRAME_BYTES):
                envelope = self._queue.popleft()
                size += len(envelope)
                taken += bytes_field(agent_pb2.Frame.ENVELOPES_FIELD_NUMBER, len(envelope)), envelope
        return b"".join(taken)

    def close(self, reason: str) -> Collection[bytes]:
        """Drops what is queued, and cuts the socket. Returns the beginnings of the envelopes that were queued."""
        with self._lock:
            self.closed_reason = reason
            dropped = {envelope[:BEGINNING_BYTES] for envelope in self._queue}
            self._queue.clear()
        if self.socket is not None:
            dropped.update(self.socket.close())
        self._set_connected()
        return dropped

    def _set_connected(self, way: AnySocket | str = "") -> None:
        """Notes that it is known what carries the envelopes: a socket, gRPC to some address, or nothing."""
        if not self.connected.done():
            self.connected.set_result(None)
            if way:
                log_connection(self._parts.handshake, self._peer.info, way)

    # The socket.

    def offer_socket(self) -> OfferedSocket | None:
        """Makes an offer to the peer; returns None if there is nothing to offer."""
        self._offered = self._parts.listener.offer(self._peer.info, same_host=self._peer.is_on_this_host)
        self.is_held = self._offered is not None
        return self._offered

    def withdraw_offer(self) -> None:
        """Withdraws the offer, if the peer has not said whether it uses it."""
        if self._offered is not None:
            self._offered.withdraw()
            self._offered = None
            self.is_held = False

    async def on_choice(self, kind: str) -> None:
        """Handles the answer to the offer. Raises TimeoutError if the peer says that it uses what there is not."""
        offered = self._offered
        if offered is not None and kind:
            connection = await offered.connection()
            if self.closed_reason is not None:
                connection.close()
            else:
                self._use(offered.offer.kind, connection)
            self._offered = None
            # Not before: the stream carries envelopes from now on, unless the socket does.
            self.is_held = False
        else:
            self.withdraw_offer()
        self._on_chosen()

    def choose(self, offer: agent_pb2.SocketOffer, round_trip: float) -> asyncio.Task[None]:
        """Begins to connect the socket that the peer offers, while the stream carries all but envelopes.

        A round trip takes so many seconds. The task is to be cancelled when the stream has ended.
        """
        self.is_held = True
        return self._parts.loop.create_task(self._choose(offer, round_trip))

    async def _choose(self, offer: agent_pb2.SocketOffer, round_trip: float) -> None:
        dialed = await self._parts.listener.dial(self._peer.member, offer, round_trip)
        if self.closed_reason is not None:
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
        if self.put_frame(agent_pb2.Frame(choice=choice).SerializeToString()):
            self.is_held = False
            self._on_chosen()
        else:
            self._on_broken("it does not read what it is sent", None)

    async def read_out(self, *, has_left: bool) -> None:
        """Waits until all that the peer has sent by the socket is read.

        If it has left, that is what it sent before its goodbye, as long as more comes. Else it may live and send
        without end, so this takes `READ_OUT_TIMEOUT_S` at most.
        """
        connection = self.socket
        while connection is not None and not self._has_socket_ended.is_set():
            connection.take_heard()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_socket_ended.wait(), READ_OUT_TIMEOUT_S)
            if not has_left or not connection.take_heard():
                return

    def _use(self, kind: str, connection: AnySocket) -> None:
        """Sends and receives by a connected socket from now on. Raises OSError, and closes the socket then."""
        parts, used = self._parts, None
        try:
            segments = pulses = None
            if kind == UNIX:
                segments, pulses = self._peer.new_segments(), PulseExchange(parts.heartbeats.pulse)
            # It is read to its end when it has broken, too.
            on_envelope = partial(self._peer.on_envelope, breaks=self._peer.breaks)
            reader = FrameReader(on_envelope, segments, pulses, parts.allocate)
            used = EnvelopeSocket(kind, connection, parts.executor, reader, self._on_end)
            if segments is not None:
                segments.connect(used.writer)
            with self._lock:
                for envelope in self._queue:
                    used.writer.send(envelope)
                self._queue.clear()
                self.socket = used
            self._set_connected(connection)
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
        self._has_socket_ended.set()
        malformed = None
        if (used := self.socket) is not None:
            self._parts.unread.discard(used)
            if (malformed := used.malformed) is not None:
                self._parts.handshake.audit.deny(used.name, malformed, worker=self._peer.info.name)
        if reason:
            self._on_broken(reason, malformed)
