"""The segments of shared memory that this worker makes.

A segment is an anonymous file in memory (memfd), whose descriptor goes over the unix sockets to its receivers. So
it has no name, nothing of it is left however a process ends, and the size of /dev/shm does not matter. It cannot
shrink or grow. Fresh segments take about ten times as long as used ones, because the kernel has to find, clear and
map their pages: so both ends keep them, and a receiver gives one back when nothing refers to its bytes any more.
"""

import fcntl
import os
import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import final

import numpy as np

from ...wire.small_tensors import Gathered
from ..segment_limit import SegmentLimit
from .buffers_in_use import BuffersInUse
from .mapping import SEALS, Mapping, may_send_back

__all__ = ["Segment", "SegmentPool"]

MIN_SEGMENT_BYTES = 64 << 10
"""Bytes of the smallest segment. The others have twice, four times, … as many."""

HERE = object()
"""Stands for this worker among those that may use the bytes of a segment."""


@final
class Segment:
    """Memory that this worker has made for other workers."""

    __slots__ = ("_bytes", "descriptor", "holders", "is_spent", "mapping", "number", "size")

    def __init__(self, number: int, size: int, data: memoryview | Gathered) -> None:
        """Makes a segment of `size` bytes that begins with `data`. Raises OSError."""
        self.number = number
        self.size = size
        self.holders: set[Hashable] = set()
        """The receivers that may use its bytes, or `HERE`. Changed with the lock of its pool."""
        self.is_spent = False
        """Whether no other bytes may be put into it: a child that somebody has forked may read those that are."""
        self.descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Writing to the file takes two thirds of the time of allocating pages and then writing to each.
            written = 0
            if isinstance(data, memoryview):
                while written < data.nbytes:
                    written += os.pwrite(self.descriptor, data[written:], written)
            if written < size:
                os.posix_fallocate(self.descriptor, written, size - written)  # fails here, not on access
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self.mapping = Mapping(self.descriptor, size)
            self._bytes = np.frombuffer(memoryview(self.mapping.buffer()), dtype=np.uint8)
            if isinstance(data, Gathered):
                self.fill(data)
        except BaseException:
            os.close(self.descriptor)
            raise

    def fill(self, data: memoryview | Gathered) -> None:
        """Copies bytes to the beginning of the segment."""
        if isinstance(data, Gathered):
            data.copy_to(self._bytes.data)
            return
        self._bytes[: data.nbytes] = np.frombuffer(data, dtype=np.uint8)  # lets other threads run meanwhile


@final
class SegmentPool:
    """The segments that this worker has made for one other worker, or for several. Safe to use from any thread.

    A segment whose bytes have been sent is free again when all receivers have given it back, or are removed. An
    only receiver may send one back with bytes, which are in use here then. One that forked children may read is
    dropped when it is free.
    """

    def __init__(self, limit: SegmentLimit, receivers: Iterable[Hashable]) -> None:
        """Makes no segment yet. All go to all receivers. The pools of this worker share the limit."""
        self._limit = limit
        self._lock = threading.Lock()
        self._receivers = set(receivers)
        self._free: dict[int, list[Segment]] = defaultdict(list)
        """The segments that no receiver uses, by size. The last one was used last."""
        self._in_use: dict[int, Segment] = {}
        """The segments that some receiver has the bytes of, by number."""
        self.spent: list[Segment] = []
        """Those that are dropped for the children that may read them, and that the receivers may still know."""
        self._ended_here: deque[int] = deque()
        """The numbers of segments whose bytes were in use here, and are not any more; added by finalizers."""
        self._buffers = BuffersInUse(self._ended_here.append)
        self.highest = 0
        """The highest number of a segment so far."""
        self._is_closed = False
        self._was_used = False
        """Whether something has been put since the last `remove_idle`."""

    def put(self, data: memoryview | Gathered) -> tuple[Segment, bool] | None:
        """Copies bytes into a segment, which its receivers then own.

        Returns:
            The segment, and whether it is new: then its descriptor has to be sent, and closed after that. None if
            there is no memory for it within the limit.
        """
        self._was_used = True
        size = max(MIN_SEGMENT_BYTES, 1 << (data.nbytes - 1).bit_length())
        with self._lock:
            if self._is_closed:
                return None
            self._take_ended()
            segment = free.pop() if (free := self._free.get(size)) else None
            if segment is not None:
                self._lend(segment)
        if segment is None:
            return self._put_into_new(size, data)
        try:
            segment.fill(data)
        except BaseException:
            with self._lock:
                self._set_free(segment)
            raise
        return segment, False

    def _put_into_new(self, size: int, data: memoryview | Gathered) -> tuple[Segment, bool] | None:
        if (number := self._limit.acquire(size)) is None:
            return None
        self.highest = max(self.highest, number)
        try:
            segment = Segment(number, size, data)
        except BaseException as error:
            self._limit.release([size])
            if isinstance(error, OSError):
                return None
            raise
        with self._lock:
            if not self._is_closed:
                self._lend(segment)
                return segment, True
        self._limit.release([size])
        os.close(segment.descriptor)
        return None

    def take_back(self, receiver: Hashable, numbers: Iterable[int], *, spent: bool = False) -> None:
        """Takes back segments that a receiver does not use any more, for good if spent; ignores others."""
        with self._lock:
            self._take_ended()
            for number in numbers:
                if (segment := self._in_use.get(number)) is not None:
                    segment.is_spent |= spent
                    self._return(segment, receiver)

    def use(self, receiver: Hashable, number: int, nbytes: int) -> memoryview | None:
        """Returns the bytes that the only receiver of a segment sends back in it; None if it may not.

        The segment is free again when nothing refers to them any more.
        """
        with self._lock:
            segment = self._in_use.get(number)
            if segment is None or segment.holders != {receiver} or not may_send_back(nbytes, segment.size):
                return None
            segment.holders = {HERE}
        buffer = segment.mapping.buffer()
        self._buffers.begin(number, buffer)
        return memoryview(buffer).cast("B")[:nbytes]

    def discard(self, segment: Segment) -> None:
        """Drops a segment that has been put, of which no receiver has been told."""
        with self._lock:
            removed = self._in_use.pop(segment.number, None)
        if removed is not None:
            self._limit.release([segment.size])

    # The methods that drop segments return them, because unmapping takes long.

    def remove_receiver(self, receiver: Hashable) -> list[Segment]:
        """Takes back all segments from a lost receiver, and sends it no others; closes after the last receiver.

        Returns the segments that are dropped.
        """
        with self._lock:
            self._receivers.discard(receiver)
            is_last = not self._receivers
            self._is_closed |= is_last  # so that nothing is put into what it has sent back
            for segment in list(self._in_use.values()):
                self._return(segment, receiver)
        return self.close() if is_last else []

    def remove_idle(self) -> list[Segment]:
        """Drops the free segments, if nothing has been put since the last call, and those that are spent.

        Returns them: the receivers do not know it yet.
        """
        was_used, self._was_used = self._was_used, False
        return [*self.take_spent(), *([] if was_used else self._drop_free())]

    def take_spent(self) -> list[Segment]:
        """Drops the spent segments that no receiver uses any more, and returns them."""
        with self._lock:
            self._take_ended()
            dropped, self.spent = self.spent, []
        return dropped

    def close_if_empty(self) -> bool:
        """Makes no segment any more if there is none now; returns whether that is so."""
        with self._lock:
            self._take_ended()
            if not self._in_use and not any(self._free.values()):
                self._is_closed = True
            return self._is_closed

    def close(self) -> list[Segment]:
        """Drops all segments, and returns them; the receivers are gone, or keep what they have mapped."""
        with self._lock:
            self._is_closed = True
            in_use = list(self._in_use.values())
            self._in_use.clear()
        self._limit.release([segment.size for segment in in_use])
        return [*in_use, *self._drop_free(), *self.take_spent()]

    def _drop_free(self) -> list[Segment]:
        with self._lock:
            self._take_ended()
            dropped = [segment for segments in self._free.values() for segment in segments]
            self._free.clear()
        self._limit.release([segment.size for segment in dropped])
        return dropped

    # With the lock.

    def _lend(self, segment: Segment) -> None:
        segment.holders.update(self._receivers)
        self._in_use[segment.number] = segment

    def _return(self, segment: Segment, receiver: Hashable) -> None:
        segment.holders.discard(receiver)
        if not segment.holders:
            self._set_free(segment)

    def _set_free(self, segment: Segment) -> None:
        segment.holders.clear()
        if segment.is_spent:
            if self._in_use.pop(segment.number, None) is not None:
                self.spent.append(segment)
                self._limit.release([segment.size])
        elif segment.number in self._in_use:
            self._free[segment.size].append(self._in_use.pop(segment.number))

    def _take_ended(self) -> None:
        """Sets the segments in `_ended_here` free. Called before any segment is used again."""
        while self._ended_here:
            number = self._ended_here.popleft()
            segment = self._in_use.get(number)
            if segment is not None and HERE in segment.holders:
                segment.is_spent |= self._buffers.is_pinned(number)
                self._set_free(segment)
