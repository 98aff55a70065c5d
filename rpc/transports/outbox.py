"""The envelopes for one peer that are not on their way yet, and the socket that they go by if there is one."""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import final

from ...proto.v1 import agent_pb2
from ..wire.parsing import bytes_field, embed
from .base import Connecting, TransportClosedError
from .envelope_socket import EnvelopeSocket
from .socket_frames import BEGINNING_BYTES

__all__ = ["Outbox"]

FRAME_BYTES = 1 << 20
"""Maximum bytes of envelopes that share a frame; a larger envelope has a frame of its own."""

MAX_FRAMES = 1 << 14
"""Frames without envelopes that are queued, at most. A worker that reads is sent some for each connection, and for
each segment of device memory."""


@final
class Outbox:
    """Queues envelopes until there is a connection, and in front of a gRPC stream. Safe to use from any thread."""

    def __init__(self) -> None:
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
        self._is_connected = False

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

    def use_socket(self, connection: EnvelopeSocket) -> None:
        """Sends by a socket from now on, beginning with what is queued."""
        with self._lock:
            for envelope in self._queue:
                connection.writer.send(envelope)
            self._queue.clear()
            self.socket = connection
        self._set_connected()

    def next_frame(self) -> bytes:
        """Takes a frame for the stream, up to FRAME_BYTES, but at least one envelope; empty if there is none."""
        if self._frames:
            return self._frames.popleft()
        if self.is_held:
            return b""
        if not self._is_connected:
            self._set_connected()
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

    def _set_connected(self) -> None:
        if not self._is_connected:
            self._is_connected = True
            self.connected.set_result(None)
