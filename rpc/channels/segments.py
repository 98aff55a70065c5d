"""Shared memory between two workers of one host: the segments that one of them makes, and the other one maps.

A segment is an anonymous file in memory (memfd), whose descriptor goes over the unix socket between the two. So it
has no name, nothing of it is left however a process ends, and the size of /dev/shm does not matter. It cannot be
shrunk or grown. Fresh segments take two to five times as long as used ones, because the kernel clears their pages:
so both ends keep them, and the receiver gives a segment back when nothing refers to its bytes any more.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import final

import numpy as np

__all__ = ["MappedSegments", "Segment", "SegmentPool", "SharedMemoryLimit"]

MIN_SEGMENT_BYTES = 64 << 10
"""Bytes of the smallest segment. The others have twice, four times, … as many."""

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

MAX_SEGMENTS = 4096
"""Segments that one agent makes, and that it maps of one other worker. A process may have 65,530 mappings."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@final
class _Mapping:
    """A file in the memory of this process, until this object goes. (Those of `mmap` keep a descriptor.)."""

    __slots__ = ("_address", "size")

    def __init__(self, descriptor: int, size: int) -> None:
        """Maps the first `size` bytes of a file. Raises OSError."""
        self.size = 0
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address = address
        self.size = size

    def __del__(self) -> None:
        if self.size:
            _libc.munmap(self._address, self.size)

    def buffer(self, nbytes: int) -> "ctypes.Array[ctypes.c_char]":
        """Returns the first bytes as a writable buffer."""
        made = (ctypes.c_char * nbytes).from_address(self._address)
        made.mapping = self  # type: ignore[attr-defined] # which lives as long as the buffer
        return made


@final
class SharedMemoryLimit:
    """Bounds the segments that one agent makes. Safe to use from any thread."""

    def __init__(self, limit: int) -> None:
        """Args: limit: bytes of all segments together."""
        self._lock = threading.Lock()
        self._limit = limit
        self._count = 0
        self.used = 0
        """Bytes of all segments that have been made and not been closed."""

    def acquire(self, nbytes: int) -> bool:
        """Counts a segment of this size; returns False if that would be too much."""
        with self._lock:
            if self.used + nbytes > self._limit or self._count >= MAX_SEGMENTS:
                return False
            self.used += nbytes
            self._count += 1
            return True

    def release(self, segments: "Sequence[Segment]") -> None:
        """Counts segments that are closed."""
        with self._lock:
            self.used -= sum(segment.size for segment in segments)
            self._count -= len(segments)

    def release_unmade(self, nbytes: int) -> None:
        """Counts back a segment that could not be made."""
        with self._lock:
            self.used -= nbytes
            self._count -= 1


@final
class Segment:
    """Memory that this worker has made for one other worker."""

    __slots__ = ("_memory", "descriptor", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        """Makes a segment of `size` bytes. Raises OSError if there is no memory or no descriptor for it."""
        self.number = number
        self.size = size
        self.descriptor = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # fails here if there is no memory, not on access
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._memory = _Mapping(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def fill(self, data: memoryview) -> None:
        """Copies bytes to the beginning of the segment."""
        target = np.frombuffer(memoryview(self._memory.buffer(data.nbytes)), dtype=np.uint8)
        np.copyto(target, np.frombuffer(data, dtype=np.uint8))  # lets other threads run meanwhile


@final
class SegmentPool:
    """The segments that this worker has made for one other worker. Safe to use from any thread."""

    def __init__(self, limit: SharedMemoryLimit) -> None:
        """Makes no segment yet; `limit` is shared with the pools for other workers."""
        self._limit = limit
        self._lock = threading.Lock()
        self._made = 0
        self._free: dict[int, list[Segment]] = defaultdict(list)
        """The segments that the other worker does not use, by size. The last one was used last."""
        self._in_use: dict[int, Segment] = {}
        """The segments that the other worker has the bytes of, by number."""
        self._is_closed = False

    def take(self, nbytes: int) -> tuple[Segment, bool] | None:
        """Takes a segment of at least `nbytes`, which the other worker then owns.

        Returns:
            The segment, and whether it is new: then its descriptor has to be sent, and closed after that. None if
            there is no memory for it within the limit.
        """
        size = max(MIN_SEGMENT_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if free := self._free.get(size):
                segment = free.pop()
                self._in_use[segment.number] = segment
                return segment, False
            if self._is_closed or not self._limit.acquire(size):
                return None
            self._made += 1
            number = self._made
        try:
            segment = Segment(number, size)
        except OSError:
            self._limit.release_unmade(size)
            return None
        with self._lock:
            if not self._is_closed:
                self._in_use[number] = segment
                return segment, True
        self._limit.release([segment])
        os.close(segment.descriptor)
        return None

    def recycle(self, numbers: Iterable[int]) -> None:
        """Takes back segments that the other worker does not use any more. Unknown numbers are ignored."""
        with self._lock:
            for number in numbers:
                if (segment := self._in_use.pop(number, None)) is not None:
                    self._free[segment.size].append(segment)

    def remove_idle(self) -> list[int]:
        """Drops the segments that the other worker does not use; returns their numbers, for the other worker."""
        with self._lock:
            idle = [segment for segments in self._free.values() for segment in segments]
            self._free.clear()
        self._limit.release(idle)
        return [segment.number for segment in idle]

    def close(self) -> None:
        """Drops all segments; the other worker is gone, or keeps what it has mapped."""
        self.remove_idle()
        with self._lock:
            self._is_closed = True
            in_use = list(self._in_use.values())
            self._in_use.clear()
        self._limit.release(in_use)


@final
class MappedSegments:
    """The segments that one other worker has made for this worker. One thread at a time uses them.

    Bytes in them belong to whoever has a buffer of them. When the last reference to a buffer is gone, the segment
    goes back to the other worker.
    """

    def __init__(self, max_bytes: int, on_released: Callable[[], None]) -> None:
        """Has mapped nothing yet.

        Args:
            max_bytes: of all segments that are mapped at a time.
            on_released: called when there is something in `released`. Finalizers call it: it must take no lock.
        """
        self._max_bytes = max_bytes
        self._on_released = on_released
        self._mapped_bytes = 0
        self._maps: dict[int, _Mapping] = {}
        """By number."""
        self._refused: set[int] = set()
        """The numbers of the segments that are not mapped because that would be too much."""
        self._pinned: set[int] = set()
        """The numbers of the segments that a forked child may still use."""
        self._leases: dict[int, weakref.ref[ctypes.Array[ctypes.c_char]]] = {}
        """The buffers in use, by the number of their segment."""
        self.released: deque[int] = deque()
        """The numbers of the segments that are not used any more, and have to be given back."""
        _mapped_here.add(self)

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Maps a new segment; the descriptor stays the caller's.

        If that would be too much, payloads in the segment are refused.

        Raises:
            ValueError: the descriptor is no segment of this size, or the number is in use.
        """
        if size < 1 or number in self._maps or number in self._refused:
            raise ValueError(f"segment {number} of {size} bytes is there already, or empty")
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if os.fstat(descriptor).st_size != size or seals & SEALS != SEALS:
                raise ValueError(f"segment {number} has not the size that was announced, or may change it")
        except OSError as error:
            raise ValueError(f"segment {number} is no segment: {error}") from None
        if len(self._maps) + len(self._refused) >= 2 * MAX_SEGMENTS:
            raise ValueError(f"segment {number} is one too many")
        if self._mapped_bytes + size > self._max_bytes or len(self._maps) >= MAX_SEGMENTS:
            self._refused.add(number)
            return
        try:
            self._maps[number] = _Mapping(descriptor, size)
        except OSError as error:  # there is no memory
            log.warning("cannot map a segment of %d bytes: %s", size, error)
            self._refused.add(number)
            return
        self._mapped_bytes += size

    def remove(self, number: int) -> None:
        """Forgets a segment that the other worker has dropped; its memory goes when nothing refers to it."""
        self._refused.discard(number)
        if (mapped := self._maps.pop(number, None)) is not None:
            self._mapped_bytes -= mapped.size

    def close(self) -> None:
        """Forgets all segments; buffers that are in use stay."""
        self._maps.clear()
        self._mapped_bytes = 0

    def lease(self, number: int, nbytes: int) -> memoryview:
        """Returns the bytes in a segment; they may be written to.

        Raises:
            ValueError: there is no such segment, it is refused or smaller, or its bytes are in use.
        """
        if number in self._refused:
            raise ValueError(
                f"a payload of {nbytes} bytes in shared memory is refused: {self._mapped_bytes} bytes are mapped, "
                f"and max_mapped_bytes is {self._max_bytes}"
            )
        mapped = self._maps.get(number)
        if mapped is None or not 0 < nbytes <= mapped.size or number in self._leases:
            raise ValueError(f"malformed payload: {nbytes} bytes in segment {number}")
        buffer = mapped.buffer(nbytes)
        self._leases[number] = weakref.ref(buffer, lambda _: self._release(number))
        return memoryview(buffer).cast("B")

    def drop(self, number: int) -> None:
        """Gives the bytes in a segment back without looking at them."""
        if number in self._refused or (number in self._maps and number not in self._leases):
            self._release(number)

    def pin_leases(self) -> None:
        """Keeps the segments that are in use from being given back: a child that is forked has them too."""
        self._pinned.update(list(self._leases))

    def _release(self, number: int) -> None:
        self._leases.pop(number, None)
        if number not in self._pinned:
            self.released.append(number)
            self._on_released()


_mapped_here: "weakref.WeakSet[MappedSegments]" = weakref.WeakSet()
"""Of all agents of this process, for a fork."""


def _pin_before_fork() -> None:
    for mapped in list(_mapped_here):
        mapped.pin_leases()


os.register_at_fork(before=_pin_before_fork)
