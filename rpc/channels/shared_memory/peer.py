"""The segments between this worker and one other."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

from ....proto.v1 import agent_pb2
from ...contracts.options import ChannelOptions
from ...execution.executor import Executor
from ...transports.socket_frames import FrameKind, FrameWriter
from ...wire.small_tensors import Gathered
from ..segment_limit import SegmentLimit
from .mapping import address_and_size
from .receiving import MappedSegments
from .sending import Segment, SegmentPool

__all__ = ["PeerSegments", "Unmapper", "describe"]

FLUSH_AFTER_S = 0.02
"""Seconds after which segments that are not used any more are given back, if no envelope tells it before."""


def describe(number: int, nbytes: int, *, sent_back: bool = False) -> agent_pb2.Payload:
    """Returns the description of a payload of `nbytes` in a segment, maybe one that goes back to its maker."""
    return agent_pb2.Payload(segment=agent_pb2.SegmentPayload(number=number, nbytes=nbytes, sent_back=sent_back))


@final
class Unmapper:
    """Unmaps segments on threads of the executor: a GiB takes 100 ms and more, in the kernel.

    Without it, this would be done by the event loop or by the thread that reads a socket.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def drop(self, dropped: list[Any]) -> None:
        """Unmaps segments, except those whose bytes are in use: they go with the last reference to their bytes.

        The caller has no other reference to segments and mappings than this list, which is emptied.
        """
        if dropped:
            self._executor.submit(self._unmap, dropped)

    def _unmap(self, dropped: list[Any]) -> None:
        with self._executor.blocking():  # another thread takes the place of this one
            dropped.clear()


@final
class PeerSegments:
    """What this worker sends to one other in segments, and receives from it: see SegmentListener."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: ChannelOptions,
        limit: SegmentLimit,
        unmapper: Unmapper,
    ) -> None:
        """Shares nothing before `connect`. The limit bounds the segments that this worker makes."""
        self.pool = SegmentPool(limit, [self])
        """The segments for the other worker alone."""
        self.shared_pools: tuple[SegmentPool, ...] = ()
        """The segments that further workers receive as well."""
        self.mapped = MappedSegments(options.max_mapped_bytes, self._on_returned)
        self.on_others_released: Callable[[Sequence[int]], None] | None = None
        """Takes the numbers of all that the other worker gives back, of which some are of no shared memory."""
        self._loop = loop
        self._unmapper = unmapper
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
        self._unmapper.drop(dropped)  # in one task: it occupies a core

    # Sending: on any thread.

    def send(self, data: memoryview | Gathered) -> agent_pb2.Payload | None:
        """Copies a payload into a segment; returns None if there is no socket, or no memory for it."""
        writer = self._writer
        if writer is None or (put := self.pool.put(data)) is None:
            return None
        segment, is_new = put
        if self.pool.spent:
            dropped: list[Any] = self.pool.take_spent()
            writer.send_numbers(FrameKind.DROPPED, [each.number for each in dropped])
            self._unmapper.drop(dropped)
        if is_new:
            writer.send_segment(segment.number, segment.size, segment.descriptor)
        return describe(segment.number, data.nbytes)

    def begin_send_back(self, data: memoryview) -> agent_pb2.Payload | None:
        """Describes a payload that may go back in the segment that it came in; None if it did not come in one.

        Called while a message still refers to the bytes. `mapped.end_send_back` follows when it does not.
        """
        number = self.mapped.begin_send_back(*address_and_size(data))
        return None if number is None else describe(number, data.nbytes, sent_back=True)

    def withdraw(self, payload: agent_pb2.Payload) -> None:
        """Takes back the segment of an envelope that was not sent, or gives it back without this."""
        if payload.segment.sent_back:
            self.mapped.abort_send_back(payload.segment.number)
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
        self._unmapper.drop(self.pool.take_spent())  # which nobody else knows

    def on_dropped(self, numbers: Sequence[int]) -> None:
        """Removes segments that the other worker does not use again."""
        self._unmapper.drop(self.mapped.remove(numbers))

    def highest(self, *, sent_back: bool) -> int:
        """Returns the highest number of a segment of the other worker, or of this one if it is sent back."""
        return self.pool.highest if sent_back else self.mapped.highest

    def use_own(self, number: int, nbytes: int) -> memoryview:
        """Returns the bytes that came back in a segment of this worker. Raises ValueError if it was not there."""
        used = self.pool.use(self, number, nbytes)
        if used is None:
            raise ValueError(f"malformed payload: {nbytes} bytes in segment {number}, which it has not got")
        return used

    # Giving back.

    def release(self, number: int) -> None:
        """Tells the other worker of something else that is not used any more, with its segments. Takes no lock."""
        self.mapped.released.append(number)
        self._on_returned()

    def _on_returned(self) -> None:
        """Has the segment given back soon. Called by finalizers: takes no lock."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._loop.call_later, FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        if self._writer is not None and self.mapped.released:
            self._writer.flush_released()
        spent, mappings = self.mapped.take_spent()
        if self._writer is not None and spent:
            self._writer.send_numbers(FrameKind.SPENT, spent)
        self._unmapper.drop(mappings)
