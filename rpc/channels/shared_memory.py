"""The channel for large payloads to a worker of this host: segments of shared memory (segments.py).

A worker is connected while there is a unix socket to it, by which each side tells the other of its segments.
Payloads for several workers of this host go in one segment, which all of them receive.
"""

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from ..execution.executor import Executor
from ..transports.socket_frames import FrameKind, FrameWriter
from ..wire.small_tensors import Gathered, address_of
from .base import PayloadLostError, SegmentLimit, check_size
from .segments import MAX_SEGMENTS, MappedSegments, Segment, SegmentPool

__all__ = ["PeerSegments", "SegmentBroadcast", "SharedMemory", "SharedMemoryChannel", "address_and_size"]

FLUSH_AFTER_S = 0.02
"""Seconds after which segments that are not used any more are given back, if no envelope tells it before."""


def address_and_size(data: memoryview) -> tuple[int, int]:
    """Returns what identifies bytes that are kept alive."""
    return address_of(data), data.nbytes


def _describe(number: int, nbytes: int, *, sent_back: bool = False) -> agent_pb2.Payload:
    """Returns the description of a payload of `nbytes` in a segment, maybe one that goes back to its maker."""
    return agent_pb2.Payload(segment=agent_pb2.SegmentPayload(number=number, nbytes=nbytes, sent_back=sent_back))


@final
class SharedMemory:
    """What the segments of one agent share. Safe to use from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor, options: ChannelOptions) -> None:
        self.options = options
        self.loop = loop
        self._executor = executor
        self.limit = SegmentLimit(options.max_shared_bytes, MAX_SEGMENTS)
        self._lock = threading.Lock()
        """Guards `_pools`."""
        self._pools: dict[frozenset[PeerSegments], SegmentPool] = {}
        """Those of the segments that several workers receive, by receivers."""

    def pool_for(self, receivers: Collection["PeerSegments"]) -> SegmentPool:
        """Returns the pool of the segments that exactly these receive."""
        key = frozenset(receivers)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = SegmentPool(self.limit, key)
                for each in key:
                    each.shared_pools = (*each.shared_pools, pool)
                    if not each.is_connected:  # since a moment ago: it may not know of this pool
                        self.unmap(pool.remove_receiver(each))
        if pool.spent:
            self.drop(pool.take_spent(), key)
        return pool

    def drop(self, segments: list[Segment], receivers: Collection["PeerSegments"]) -> None:
        """Has segments unmapped, here and by their receivers."""
        numbers = [segment.number for segment in segments]
        for each in receivers:
            each.send_dropped(numbers)
        self.unmap(segments)

    def unmap(self, dropped: list[Any]) -> None:
        """Unmaps segments, except those whose bytes are in use: they go with the last reference to their bytes.

        That is done on a thread of the executor, as a GiB takes 100 ms and more in the kernel. The caller has no
        other reference to segments and mappings than this list, which is emptied.
        """
        if dropped:
            self._executor.submit(self._unmap, dropped)

    def _unmap(self, dropped: list[Any]) -> None:
        with self._executor.blocking():  # another thread takes the place of this one
            dropped.clear()

    def remove_idle(self) -> None:
        """Drops the free segments of the pools that were not used since the last call."""
        for receivers, pool in self._pools.copy().items():
            self.drop(pool.remove_idle(), receivers)
            if pool.close_if_empty():
                with self._lock:
                    del self._pools[receivers]
                    for each in receivers:
                        each.shared_pools = tuple(other for other in each.shared_pools if other is not pool)


@final
class PeerSegments:
    """What this worker sends to one other in segments, and receives from it: a SegmentListener of one socket."""

    def __init__(self, memory: SharedMemory) -> None:
        """Shares nothing before `connect`."""
        self._memory = memory
        self.pool = SegmentPool(memory.limit, [self])
        """The segments for the other worker alone."""
        self.shared_pools: tuple[SegmentPool, ...] = ()
        """The segments that further workers receive as well."""
        self.mapped = MappedSegments(memory.options.max_mapped_bytes, self._on_returned)
        self.on_others_released: Callable[[Sequence[int]], None] | None = None
        """Takes the numbers of all that the other worker gives back, of which some are of no shared memory."""
        self._writer: FrameWriter | None = None
        self._is_flush_scheduled = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a socket to the other worker."""
        return self._writer is not None

    @property
    def released(self) -> deque[int]:
        """The segments of the other worker that are not used any more, and that it has not been told of."""
        return self.mapped.released

    def connect(self, writer: FrameWriter) -> None:
        """Uses a socket from now on. Called on the loop."""
        self._writer = writer

    def close(self) -> None:
        """Drops the segments for the other worker, which is lost. Bytes received from it stay."""
        self._writer = None
        dropped: list[Any] = self.mapped.close()
        for pool in (self.pool, *self.shared_pools):
            dropped += pool.remove_receiver(self)
        self._memory.unmap(dropped)  # in one task: it occupies a core

    # Sending: on any thread.

    def send(self, data: memoryview | Gathered) -> agent_pb2.Payload | None:
        """Copies a payload into a segment; returns None if there is no socket, or no memory for it."""
        writer = self._writer
        if writer is None or (put := self.pool.put(data)) is None:
            return None
        segment, is_new = put
        if self.pool.spent:
            self._memory.drop(self.pool.take_spent(), [self])
        if is_new:
            writer.send_segment(segment.number, segment.size, segment.descriptor)
        return _describe(segment.number, data.nbytes)

    def begin_send_back(self, data: memoryview) -> agent_pb2.Payload | None:
        """Describes a payload that may go back in the segment that it came in; None if it did not come in one.

        Called while a message still refers to the bytes. `mapped.end_send_back` follows when it does not.
        """
        number = self.mapped.begin_send_back(*address_and_size(data))
        return None if number is None else _describe(number, data.nbytes, sent_back=True)

    def withdraw(self, payload: agent_pb2.Payload) -> None:
        """Takes back the segment of an envelope that was not sent, or gives it back without this."""
        if payload.segment.sent_back:
            self.mapped.release(payload.segment.number)
        else:
            self.on_released([payload.segment.number])

    def announce(self, segment: Segment, descriptor: int) -> None:
        """Tells the other worker of a segment that further workers receive as well. Closes the descriptor."""
        if (writer := self._writer) is not None:
            writer.send_segment(segment.number, segment.size, descriptor, is_shared=True)
        else:
            os.close(descriptor)

    def send_dropped(self, numbers: Sequence[int]) -> None:
        """Tells the other worker of segments that are not used again."""
        if (writer := self._writer) is not None:
            writer.send_numbers(FrameKind.DROPPED, numbers)

    # The frames about segments.

    def on_segment(self, number: int, size: int, descriptor: int, *, is_shared: bool) -> None:
        """Maps a segment of the other worker."""
        self.mapped.add(number, size, descriptor, is_shared=is_shared)

    def on_released(self, numbers: Sequence[int]) -> None:
        """Takes back segments that the other worker does not use any more."""
        for pool in (self.pool, *self.shared_pools):
            pool.take_back(self, numbers)
        if self.on_others_released is not None:
            self.on_others_released(numbers)

    def on_spent(self, numbers: Sequence[int]) -> None:
        """Takes back segments to drop: the other worker could not map them, or children of it still use them."""
        for pool in (self.pool, *self.shared_pools):
            pool.take_back(self, numbers, spent=True)
        self._memory.unmap(self.pool.take_spent())  # which nobody else knows

    def on_dropped(self, numbers: Sequence[int]) -> None:
        """Removes segments that the other worker does not use again."""
        self._memory.unmap(self.mapped.remove(numbers))

    # Receiving: on the thread that reads the socket.

    def use(self, payload: agent_pb2.SegmentPayload) -> memoryview:
        """Returns the bytes of a payload, in a segment of either worker. Raises ValueError if it is malformed."""
        if not payload.sent_back:
            return self.mapped.use(payload.number, payload.nbytes)
        used = self.pool.use(self, payload.number, payload.nbytes)
        if used is None:
            problem = f"{payload.nbytes} bytes in segment {payload.number}, which it has not got"
            raise ValueError(f"malformed payload: {problem}")
        return used

    # Giving back.

    def _on_returned(self) -> None:
        """Has the segment given back soon. Called by finalizers: takes no lock."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            loop = self._memory.loop
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(loop.call_later, FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        if self._writer is not None and self.mapped.released:
            self._writer.flush_released()
        spent, mappings = self.mapped.take_spent()
        if self._writer is not None and spent:
            self._writer.send_numbers(FrameKind.SPENT, spent)
        self._memory.unmap(mappings)


@final
class SharedMemoryChannel:
    """Copies payloads into segments, which the receiver maps, and so receives them without a copy.

    What has come from a worker in a segment, and nothing else refers to, goes back to it in the same one: that
    takes no copy at all. Payloads for workers that are not connected, and beyond the limit of shared memory, have
    to go by another channel.
    """

    name: ClassVar[str] = "segment"

    def __init__(self, memory: SharedMemory, *, may_connect: bool) -> None:
        """Shares nothing yet; never if there can be no unix socket to the worker."""
        self.may_connect = may_connect
        self._memory = memory
        self.segments = PeerSegments(memory)
        """Those of the socket that there is now, or was last."""
        self._former: PeerSegments | None = None
        """Those of the last connection that broke: some of what came by it may be read after that."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a unix socket to the worker."""
        return self.segments.is_connected

    def connect(self) -> PeerSegments:
        """Returns what handles the frames about segments on a new socket. Called on the loop."""
        self.segments = PeerSegments(self._memory)
        return self.segments

    def receive(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes in their segment. Called by the thread that reads the socket."""
        segment = payload.segment
        check_size(segment.nbytes, self._memory.options)
        try:
            return self.segments.use(segment)
        except ValueError:
            former = self._former
            # A worker's numbers only grow.
            if (
                former is not None
                and segment.number <= (former.pool if segment.sent_back else former.mapped).highest
            ):
                raise PayloadLostError("its connection broke before it was read") from None
            raise

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Gives the segment back. Called on any thread."""
        segments, number = self.segments, payload.segment.number
        if payload.segment.sent_back:
            segments.on_released([number])
        else:
            segments.mapped.drop(number)

    def drop(self, error: Exception) -> None:
        """Drops the segments of the connection. Bytes that were received stay readable and writable."""
        self._former = self.segments  # first: another thread may read at the same time
        self.segments.close()
        if isinstance(error, ConnectionError):  # there is no other one
            self._former = None

    def remove_idle(self) -> None:
        """Drops the free segments, if nothing has been sent since the last call."""
        segments = self.segments
        self._memory.drop(segments.pool.remove_idle(), [segments])


@final
class SegmentBroadcast:
    """The payloads in segments that the messages of one call share. Used by one thread.

    The receivers map these segments privately, so each can write to what it receives.
    """

    def __init__(self, memory: SharedMemory, receivers: Collection[PeerSegments]) -> None:
        """Shares nothing yet. Uses the segments that exactly these receive."""
        self._pool = memory.pool_for(receivers)
        self._receivers = receivers
        self._payloads: dict[int, tuple[Segment, set[PeerSegments]]] = {}
        """By position in the messages: the segment, and who is not told of it yet."""

    def put(
        self, receiver: PeerSegments, position: int, data: memoryview
    ) -> tuple[agent_pb2.Payload, None, bool] | None:
        """Copies a payload of a message into a segment, unless that was done for an earlier message.

        Args and returns as `Broadcast.put`. None also if the receiver has no segments, or there is no memory.
        """
        if receiver not in self._receivers:
            return None
        is_first = position not in self._payloads
        if is_first:
            if (made := self._put_first(data)) is None:
                return None
            self._payloads[position] = made, set(self._receivers)
        segment, missing = self._payloads[position]
        missing.discard(receiver)
        return _describe(segment.number, data.nbytes), None, is_first

    def _put_first(self, data: memoryview) -> Segment | None:
        """Copies a payload into a segment, and passes a new one to all receivers, before their messages."""
        if (put := self._pool.put(data)) is None:
            return None
        segment, is_new = put
        if not is_new:
            return segment
        descriptors = [segment.descriptor]
        try:
            while len(descriptors) < len(self._receivers):
                descriptors.append(os.dup(segment.descriptor))
        except OSError:  # too many are open
            for descriptor in descriptors:
                os.close(descriptor)
            for receiver in self._receivers:
                self._pool.take_back(receiver, [segment.number], spent=True)
            return None
        for receiver, descriptor in zip(self._receivers, descriptors, strict=True):
            receiver.announce(segment, descriptor)
        return segment

    def release(self) -> None:
        """Takes the segments back from receivers to which no message has named them. Called after the last one."""
        for segment, missing in self._payloads.values():
            for receiver in missing:
                self._pool.take_back(receiver, [segment.number])
