"""The channel for large payloads between workers of one host: segments of shared memory."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import ClassVar, final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from ..transports.envelope_socket import EnvelopeSocket
from .base import check_size
from .segments import MappedSegments, SegmentPool, SharedMemoryLimit

__all__ = ["SharedMemoryChannel"]

FLUSH_AFTER_S = 0.02
"""Seconds after which segments that are not used any more are given back, if no envelope tells it before."""

IDLE_TIMEOUT_S = 10.0
"""Seconds after which a pool that nothing has been sent from drops the segments that are free."""


@final
class SharedMemoryChannel:
    """Copies payloads into segments, which the receiver maps, and so receives them without a copy.

    A worker is connected by `connect` when there is a unix socket to it; to other workers, and beyond the limit of
    shared memory, `send` sends nothing, and the payload has to go by another channel.
    """

    name: ClassVar[str] = "segment"

    def __init__(self, loop: asyncio.AbstractEventLoop, options: ChannelOptions) -> None:
        """Shares nothing yet; `loop` is the agent's event loop."""
        self._loop = loop
        self._options = options
        self._limit = SharedMemoryLimit(options.max_shared_bytes)
        self._peers: dict[int, _Peer] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments that this worker has made."""
        return self._limit.used

    def listener(self, peer: int) -> "_Peer":
        """Returns what handles the frames about segments on a new socket to a worker."""
        state = self._peers[peer] = _Peer(self._loop, self._options, SegmentPool(self._limit))
        return state

    def send(self, peer: int, data: memoryview) -> agent_pb2.Payload | None:
        """Copies a payload into a segment.

        Returns:
            Its description; None if there is no socket to the peer, or no memory within the limit.
        """
        state = self._peers.get(peer)
        return None if state is None else state.send(data)

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes in their segment. Called by the thread that reads the socket.

        Raises:
            ValueError: there is no such segment, or its bytes are in use.
        """
        state = self._peers.get(peer)
        if state is None:
            raise ValueError("malformed payload: a segment of a worker on another host")
        check_size(payload.segment.nbytes, self._options)
        return state.mapped.lease(payload.segment.number, payload.segment.nbytes)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Gives the segment back."""
        if (state := self._peers.get(peer)) is not None:
            state.mapped.drop(payload.segment.number)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns False: the receiver can look at the segment."""
        return False

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Takes back the segment of an envelope that was not sent."""
        if (state := self._peers.get(peer)) is not None:
            state.pool.recycle([payload.segment.number])

    def drop_peer(self, peer: int, reason: str) -> None:  # noqa: ARG002
        """Drops the segments for a lost peer. Bytes that were received from it stay readable and writable."""
        if (state := self._peers.pop(peer, None)) is not None:
            state.close()

    async def close(self) -> None:
        """Drops all segments."""
        for peer in list(self._peers):
            self.drop_peer(peer, "this worker shuts down")


@final
class _Peer:
    """The segments between this worker and one other: a SegmentListener."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: ChannelOptions, pool: SegmentPool) -> None:
        self.pool = pool
        self.mapped = MappedSegments(options.max_mapped_bytes, self._on_lease_released)
        self._loop = loop
        self._socket: EnvelopeSocket | None = None
        self._is_flush_scheduled = False
        self._was_used = False
        self._idle_check: asyncio.TimerHandle | None = None

    def connect(self, connection: EnvelopeSocket) -> None:
        """Uses a socket from now on. Called on the loop."""
        connection.released = self.mapped.released
        self._socket = connection
        self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._drop_idle)

    def send(self, data: memoryview) -> agent_pb2.Payload | None:
        connection = self._socket
        if connection is None or (taken := self.pool.take(data.nbytes)) is None:
            return None
        segment, is_new = taken
        self._was_used = True
        try:
            segment.fill(data)
        except BaseException:
            if is_new:
                os.close(segment.descriptor)  # the peer never hears of it
            else:
                self.pool.recycle([segment.number])
            raise
        if is_new:
            connection.send_segment(segment.number, segment.size, segment.descriptor)
        return agent_pb2.Payload(segment=agent_pb2.SegmentPayload(number=segment.number, nbytes=data.nbytes))

    def close(self) -> None:
        self._socket = None
        if self._idle_check is not None:
            self._idle_check.cancel()
        self.pool.close()
        self.mapped.close()

    # The frames about segments.

    def on_segment(self, number: int, size: int, descriptor: int) -> None:
        self.mapped.add(number, size, descriptor)

    def on_released(self, numbers: Sequence[int]) -> None:
        self.pool.recycle(numbers)

    def on_dropped(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.mapped.remove(number)

    # Giving back, and dropping what is idle.

    def _on_lease_released(self) -> None:
        """Has the segment given back soon. Called by finalizers: takes no lock."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._call_soon(self._schedule_flush)

    def _call_soon(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)

    def _schedule_flush(self) -> None:
        self._loop.call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        if self._socket is not None and self.mapped.released:
            self._socket.flush_released()

    def _drop_idle(self) -> None:
        """Drops the free segments of a pool that was not used since the last check."""
        if self._socket is None:
            return
        if not self._was_used and (dropped := self.pool.remove_idle()):
            self._socket.send_dropped(dropped)
        self._was_used = False
        self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._drop_idle)
