"""The channel for large payloads between workers of one host: segments of shared memory."""

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, final

from ....proto.v1 import agent_pb2
from ...contracts.messages import Buffer
from ...contracts.options import ChannelOptions
from ...execution.executor import Executor
from ...wire.gathered import Gathered
from ..base import PayloadLostError, check_size
from ..segment_limit import SegmentLimit
from .broadcast import SegmentBroadcast
from .leases import Memory
from .mapping import MAX_SEGMENTS
from .peer import PeerSegments
from .sending import Segment, SegmentPool
from .unmapping import Unmapper

__all__ = ["SharedMemoryChannel"]

IDLE_TIMEOUT_S = 10.0
"""Seconds after which a pool that nothing has been sent from drops the segments that are free."""


@final
class SharedMemoryChannel:
    """Copies payloads into segments, which the receiver maps, and so receives them without a copy.

    What has come from a worker in a segment, and nothing else refers to, goes back to it in the same one: that
    takes no copy at all.

    A worker is connected by `listener` when there is a unix socket to it; to other workers, and beyond the limit
    of shared memory, `send` sends nothing, and the payload has to go by another channel.
    """

    name: ClassVar[str] = "segment"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        options: ChannelOptions,
        may_connect: Callable[[int], bool],
    ) -> None:
        """Shares nothing yet.

        Args:
            loop: the agent's event loop.
            executor: its threads unmap what is not used any more.
            options: the bounds.
            may_connect: tells by the id of a worker whether there can be a unix socket to it.
        """
        self.may_connect = may_connect
        self._loop = loop
        self._options = options
        self._unmapper = Unmapper(executor)
        self._limit = SegmentLimit(options.max_shared_bytes, MAX_SEGMENTS)
        self._lock = threading.Lock()
        """Guards changes of `_peers`, and `_shared_pools`."""
        self._peers: dict[int, PeerSegments] = {}
        self._former: dict[int, PeerSegments] = {}
        """Those of the last connection that broke, by peer: some of what came by it may be read after that."""
        self._shared_pools: dict[frozenset[PeerSegments], SegmentPool] = {}
        """The pools of segments that several workers receive, by receivers."""
        self._idle_check: asyncio.TimerHandle | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments that this worker has made."""
        return self._limit.used

    def is_connected(self, peer: int) -> bool:
        """Returns whether there is a unix socket to a peer."""
        state = self._peers.get(peer)
        return state is not None and state.is_connected

    def listener(self, peer: int) -> PeerSegments:
        """Returns what handles the frames about segments on a new socket to a worker. Called on the loop."""
        state = PeerSegments(self._loop, self._options, self._limit, self._unmapper)
        with self._lock:
            self._peers[peer] = state
        if self._idle_check is None:
            self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._drop_idle)
        return state

    def send(self, peer: int, data: memoryview | Gathered) -> agent_pb2.Payload | None:
        """Copies a payload into a segment.

        Returns:
            Its description; None if there is no socket to the peer, or no memory within the limit.
        """
        state = self._peers.get(peer)
        return None if state is None else state.send(data)

    def begin_send_back(self, peer: int, data: memoryview) -> agent_pb2.Payload | None:
        """Describes a payload that may go back in the segment that it came in; None if it came in no such segment.

        Called while a message still refers to the bytes. `end_send_back` follows when it does not.
        """
        state = self._peers.get(peer)
        return None if state is None else state.begin_send_back(data)

    def end_send_back(self, peer: int, payload: agent_pb2.Payload) -> Memory | None:
        """Returns None if a payload goes back in its segment; else its bytes, because something refers to them."""
        state = self._peers.get(peer)
        return None if state is None else state.mapped.end_send_back(payload.segment.number)

    def broadcast(self, receivers: Collection[int]) -> SegmentBroadcast | None:
        """Returns what messages to these workers share; None if fewer than two of them are connected."""
        with self._lock:
            connected = {
                peer: state
                for peer in receivers
                if (state := self._peers.get(peer)) is not None and state.is_connected
            }
            if len(connected) < 2:
                return None
            key = frozenset(connected.values())
            pool = self._shared_pools.get(key)
            if pool is None:
                pool = self._shared_pools[key] = SegmentPool(self._limit, key)
                for state in key:
                    state.shared_pools = (*state.shared_pools, pool)
        if pool.spent:
            self._drop(pool.take_spent(), key)
        return SegmentBroadcast(pool, connected)

    def share_credits(self, peer: int, on_released: Callable[[Sequence[int]], None]) -> bool:
        """Has numbers that a peer gives back, in the frames that give back its segments, reported elsewhere, too.

        Args:
            peer: the other worker.
            on_released: takes the numbers, those of segments as well. Called by the thread that reads the socket.

        Returns:
            Whether there is a socket to the peer.
        """
        state = self._peers.get(peer)
        if state is None or not state.is_connected:
            return False
        state.on_others_released = on_released
        return True

    def releaser(self, peer: int) -> Callable[[int], None] | None:
        """Returns what gives numbers back to a peer in these frames; None if there is no socket to the peer."""
        state = self._peers.get(peer)
        return state.release if state is not None and state.is_connected else None

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes in their segment. Called by the thread that reads the socket.

        Raises:
            PayloadLostError: its connection broke before this was read.
            ValueError: there is no such segment, or its bytes are in use.
        """
        number, nbytes = payload.segment.number, payload.segment.nbytes
        check_size(nbytes, self._options)
        state = self._peers.get(peer)
        try:
            if state is None:
                raise ValueError("malformed payload: a segment of a worker on another host")
            if payload.segment.sent_back:
                return state.lease_own(number, nbytes)
            return state.mapped.lease(number, nbytes)
        except ValueError:
            former = self._former.get(peer)
            # A worker's numbers only grow.
            if former is not None and number <= former.highest(sent_back=payload.segment.sent_back):
                raise PayloadLostError("its connection broke before it was read") from None
            raise

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Gives the segment back."""
        if (state := self._peers.get(peer)) is None:
            return
        if payload.segment.sent_back:
            state.on_released([payload.segment.number])
        else:
            state.mapped.drop(payload.segment.number)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns False: the receiver can look at the segment."""
        return False

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Takes back the segment of an envelope that was not sent, or gives it back without this."""
        if (state := self._peers.get(peer)) is None:
            return
        if payload.segment.sent_back:
            state.mapped.abort_send_back(payload.segment.number)
        else:
            state.on_released([payload.segment.number])

    def drop_peer(self, peer: int, reason: str) -> None:  # noqa: ARG002
        """Drops the segments for a lost peer. Bytes that were received from it stay readable and writable."""
        self._drop_segments(peer)
        self._former.pop(peer, None)

    def drop_connection(self, peer: int, reason: str) -> None:  # noqa: ARG002
        """Drops the segments for a peer: others are made when there is another socket to it."""
        self._drop_segments(peer)

    def _drop_segments(self, peer: int) -> None:
        with self._lock:
            if (state := self._peers.get(peer)) is None:
                return
            self._former[peer] = state  # first: another thread may read at the same time
            del self._peers[peer]
        state.close()

    async def close(self) -> None:
        """Drops all segments."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        for peer in list(self._peers):
            self.drop_peer(peer, "this worker shuts down")

    def _drop_idle(self) -> None:
        """Drops the free segments of the pools that were not used since the last check. Called on the loop."""
        self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._drop_idle)
        for state in self._peers.values():
            self._drop(state.pool.remove_idle(), [state])
        for receivers, pool in self._shared_pools.copy().items():
            self._drop(pool.remove_idle(), receivers)
            if pool.close_if_empty():
                with self._lock:
                    del self._shared_pools[receivers]
                    for state in receivers:
                        state.shared_pools = tuple(each for each in state.shared_pools if each is not pool)

    def _drop(self, segments: list[Segment], receivers: Collection[PeerSegments]) -> None:
        """Has segments unmapped, here and by their receivers."""
        numbers = [segment.number for segment in segments]
        for state in receivers:
            state.send_dropped(numbers)
        self._unmapper.drop(segments)
