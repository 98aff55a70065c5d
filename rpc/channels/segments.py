"""Segments of shared memory: those that this worker makes for others, and those that others have made for it.

A segment is an anonymous file in memory (memfd), whose descriptor goes over the unix sockets to its receivers. So
it has no name, nothing of it is left however a process ends, and the size of /dev/shm does not matter. It cannot
shrink or grow. Fresh segments take about ten times as long as used ones, because the kernel has to find, clear and
map their pages: so both ends keep them, and a receiver gives one back when nothing refers to its bytes any more.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable
from functools import partial
from typing import final

import numpy as np

from ...net.inheritance import at_fork
from ..wire.small_tensors import Gathered
from .base import SegmentLimit

__all__ = ["MAX_SEGMENTS", "SEALS", "MappedSegments", "Mapping", "Segment", "SegmentPool"]

MAX_SEGMENTS = 4096
"""Segments that one agent makes, and that it maps of one other worker. A process may have 65,530 mappings."""

MIN_SEGMENT_BYTES = 64 << 10
"""Bytes of the smallest segment. The others have twice, four times, … as many."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of every segment, whose size stays as it is."""

_WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, of which Python has no name
"""Of no segment: each of them keeps others from mapping it so that they can write to it."""

_PAGES_AT_A_TIME = 1 << 17
"""Pages whose state is read at a time: eight bytes each."""

_HERE = object()
"""Stands for this worker among those that may use the bytes of a segment."""

log = logging.getLogger(__name__)

_Memory = ctypes.Array[ctypes.c_char]
"""A buffer of the bytes of a segment."""

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
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

_MADV_DONTFORK, _MADV_DOFORK = 10, 11

_IN_MEMORY, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
"""Bits in the last byte of a page's entry in /proc/self/pagemap."""

_NO_COPY = bytes(last for last in range(256) if last & _OF_FILE or not last & (_IN_MEMORY | _SWAPPED))
"""The last bytes of the entries of pages that are those of the file, or not mapped."""


@final
class Mapping:
    """A file in the memory of this process, until this object goes.

    Unlike `mmap`, it keeps no descriptor. What is written to a private one stays in this process: the kernel
    copies a page when it is first written to. Children that are forked have it only if `share_with_children` has
    been called.
    """

    __slots__ = ("_process", "_type", "address", "is_inherited", "is_private", "size")

    def __init__(self, descriptor: int, size: int, *, private: bool = False) -> None:
        """Maps the first `size` bytes of a file. Raises OSError."""
        self.is_private = private
        self.is_inherited = False
        """Whether forked children may use it: no other bytes may be put there."""
        self.size = 0
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address = address
        self._process = os.getpid()
        _libc.madvise(address, size, _MADV_DONTFORK)
        self._type = ctypes.c_char * size
        self.size = size

    def __del__(self) -> None:
        # Else this is a child, which has something else there.
        if self.size and (self.is_inherited or self._process == os.getpid()):
            _libc.munmap(self.address, self.size)

    def share_with_children(self) -> None:
        """Has the children that are forked from now on have the file in their memory as well."""
        if not self.is_inherited:
            _libc.madvise(self.address, self.size, _MADV_DOFORK)
            self.is_inherited = True

    def buffer(self) -> "ctypes.Array[ctypes.c_char]":
        """Returns the bytes as a writable buffer, a new object."""
        made = self._type.from_address(self.address)
        made.mapping = self  # type: ignore[attr-defined] # which lives as long as the buffer
        return made

    def discard_writes(self) -> bool:
        """Drops the copies of pages that a private mapping has, so that it is the file again.

        Returns whether there may have been any. Raises OSError if this process has locked its memory.
        """
        # Most receivers only read. To look for copies takes a tenth of the time of dropping and mapping all pages.
        if not _has_copies(self.address, self.size):
            return False
        if _libc.madvise(self.address, self.size, mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return True


def _has_copies(address: int, size: int) -> bool:
    """Returns whether some pages of a private mapping of a file may not be those of the file."""
    first, count = address // mmap.PAGESIZE, -(-size // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for begin in range(first, first + count, _PAGES_AT_A_TIME):
                wanted = 8 * min(_PAGES_AT_A_TIME, first + count - begin)
                entries = os.pread(pages.fileno(), wanted, 8 * begin)
                if len(entries) != wanted:
                    return True
                if entries[7::8].translate(None, _NO_COPY):
                    return True
    except OSError:
        return True  # a system that does not tell
    return False


def _may_send_back(nbytes: int, segment_bytes: int) -> bool:
    """Returns whether so many bytes may go back in their segment: a small part would keep all of it in use."""
    return segment_bytes <= 4 * nbytes <= 4 * segment_bytes


@final
class _BuffersInUse:
    """Which segments have bytes that something in this process refers to, by way of a buffer."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        """Has none yet. `on_end` takes the number of a segment that nothing refers to any more.

        Finalizers call it, on any thread: it must take no lock.
        """
        self._on_end = on_end
        self._buffers: dict[int, weakref.ref[_Memory]] = {}
        """By the number of their segment."""
        _made_here.add(self)

    def __contains__(self, number: int) -> bool:
        return self.buffer(number) is not None

    def __len__(self) -> int:
        return len(self._buffers)

    def begin(self, number: int, buffer: _Memory) -> None:
        """Has a segment in use until nothing refers to this buffer of its bytes any more."""
        self._buffers[number] = weakref.ref(buffer, partial(self._end, number))

    def buffer(self, number: int) -> _Memory | None:
        """Returns the bytes of a segment that are in use; None if they are not."""
        found = self._buffers.get(number)
        return None if found is None else found()

    def pin(self) -> None:
        """Has a child that is about to be forked have the segments that are in use, as they are."""
        for found in list(self._buffers.values()):
            if (buffer := found()) is not None:
                buffer.mapping.share_with_children()  # type: ignore[attr-defined]

    def _end(self, number: int, buffer: "weakref.ref[_Memory]") -> None:
        if self._buffers.get(number) is buffer:  # else the segment is in use again
            self._buffers.pop(number, None)
        self._on_end(number)


_made_here: "weakref.WeakSet[_BuffersInUse]" = weakref.WeakSet()
"""Of all agents of this process, for a fork."""


def _pin_before_fork() -> None:
    for each in list(_made_here):
        each.pin()


at_fork(before=_pin_before_fork)


@final
class Segment:
    """Memory that this worker has made for other workers."""

    __slots__ = ("_bytes", "descriptor", "holders", "is_spent", "mapping", "number", "size")

    def __init__(self, number: int, size: int, data: memoryview | Gathered) -> None:
        """Makes a segment of `size` bytes that begins with `data`. Raises OSError."""
        self.number = number
        self.size = size
        self.holders: set[Hashable] = set()
        """The receivers that may use its bytes, or `_HERE`. Changed with the lock of its pool."""
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
        """Those that are not used again, and that receivers may still know. Not counted by the limit."""
        self._ended_here: deque[int] = deque()
        """The numbers of segments whose bytes were in use here, and are not any more; added by finalizers."""
        self._buffers = _BuffersInUse(self._ended_here.append)
        self.highest = 0
        """The highest number of a segment so far."""
        self._is_closed = False
        self._was_used = False
        """Whether something has been put since the last `remove_idle`."""

    def put(self, data: memoryview | Gathered) -> tuple[Segment, bool] | None:
        """Copies bytes into a segment, which its receivers then own; returns None if there is no memory for it.

        Also returns whether the segment is new: then its descriptor has to be sent, and closed after that.
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
            if segment is None or segment.holders != {receiver} or not _may_send_back(nbytes, segment.size):
                return None
            segment.holders = {_HERE}
        buffer = segment.mapping.buffer()
        self._buffers.begin(number, buffer)
        return memoryview(buffer).cast("B")[:nbytes]

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
            if not is_last:
                return []
            in_use = list(self._in_use.values())  # with what has come back in them
            self._in_use.clear()
        self._limit.release([segment.size for segment in in_use])
        return [*in_use, *self._drop_free(), *self.take_spent()]

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
            if segment is not None and _HERE in segment.holders:
                segment.is_spent |= segment.mapping.is_inherited
                self._set_free(segment)


@final
class MappedSegments:
    """The segments that one other worker has made for this worker. One thread at a time receives them.

    Bytes in them belong to whoever has a buffer of them. When the last reference to a buffer is gone, the segment
    is returned to the other worker. Or it is sent back with its bytes, as a payload: `begin_send_back` is called
    while a message still refers to them, and `end_send_back` when it does not, on any thread.

    What other workers receive as well is mapped privately, so that the kernel copies each page that is written to.
    That takes ten times as long as copying all at once: once some have been written to, the next ones are copied.
    """

    def __init__(self, max_bytes: int, on_released: Callable[[], None]) -> None:
        """Maps at most `max_bytes` at a time.

        `on_released` is called when there is something in `released`, or for `take_spent`. Finalizers call it: it
        must take no lock.
        """
        self._max_bytes = max_bytes
        self._on_released = on_released
        self._mapped_bytes = 0
        self._maps: dict[int, Mapping] = {}
        """By number."""
        self._numbers: dict[int, int] = {}
        """Those of the segments that are mapped, by address."""
        self._refused: dict[int, str] = {}
        """Why segments are not mapped, by their number. Their maker makes others for the next payloads."""
        self._in_use = _BuffersInUse(self._on_unused)
        self._going_back: dict[int, object] = {}
        """The segments that go back with their bytes when nothing refers to these: by number, something unique."""
        self._are_written_to = False
        """Whether bytes that other workers received as well have been written to."""
        self.highest = 0
        """The highest number that the other worker has given a segment."""
        self._is_closed = False
        self.released: deque[int] = deque()
        """The numbers of the segments that are not used any more, and have to be given back."""
        self._spent: deque[int] = deque()
        """The numbers of those that are not to be used again: a forked child may read them, or they cannot be
        mapped."""

    def add(self, number: int, size: int, descriptor: int, *, is_shared: bool = False) -> None:
        """Maps a segment: see `SegmentListener.on_segment`. If that would be too much, payloads in it are refused.

        Raises ValueError if the descriptor is no segment of this size, or the number is in use.
        """
        self.highest = max(self.highest, number)
        if self._is_closed:
            return
        if size < 1 or number in self._maps or number in self._refused:
            raise ValueError(f"segment {number} of {size} bytes is there already, or empty")
        if descriptor >= 0:
            _check_segment(number, size, descriptor)
        if len(self._maps) + len(self._refused) >= 2 * MAX_SEGMENTS:
            raise ValueError(f"segment {number} is one too many")
        if descriptor < 0:
            self._refused[number] = f"no file descriptor was left for it ({os.strerror(errno.EMFILE)})"
            log.warning("no file descriptor is left for a segment of %d bytes", size)
        elif self._mapped_bytes + size > self._max_bytes or len(self._maps) >= MAX_SEGMENTS:
            limit = f"{self._mapped_bytes} bytes are mapped, and max_mapped_bytes is {self._max_bytes}"
            self._refused[number] = limit
        else:
            try:
                mapped = self._maps[number] = Mapping(descriptor, size, private=is_shared)
            except OSError as error:
                self._refused[number] = f"there is no memory ({os.strerror(errno.ENOMEM)})"
                log.warning("cannot map a segment of %d bytes: %s", size, error)
                return
            self._numbers[mapped.address] = number
            self._mapped_bytes += size

    def remove(self, numbers: Collection[int]) -> list[Mapping]:
        """Removes segments that the other worker has dropped.

        Returns those that are mapped: each stays until nothing refers to its bytes.
        """
        for number in numbers:
            self._refused.pop(number, None)
        removed = [self._maps.pop(number) for number in numbers if number in self._maps]
        for mapped in removed:
            self._mapped_bytes -= mapped.size
            self._numbers.pop(mapped.address, None)
        return removed

    def close(self) -> list[Mapping]:
        """Removes all segments, and returns them. Those that are added later are not mapped."""
        self._is_closed = True
        return self.remove(list(self._maps))

    def use(self, number: int, nbytes: int) -> memoryview:
        """Returns the bytes in a segment; they may be written to.

        Raises ValueError if there is no such segment, it is refused or smaller, or its bytes are in use.
        """
        if (reason := self._refused.get(number)) is not None:
            raise ValueError(f"a payload of {nbytes} bytes in shared memory is refused: {reason}")
        mapped = self._maps.get(number)
        if mapped is None or not 0 < nbytes <= mapped.size or number in self._in_use:
            raise ValueError(f"malformed payload: {nbytes} bytes in segment {number}")
        if mapped.is_private and self._are_written_to:
            copied = np.frombuffer(memoryview(mapped.buffer()), np.uint8, nbytes).copy()
            self.release(number)
            return copied.data
        buffer = mapped.buffer()
        self._in_use.begin(number, buffer)
        return memoryview(buffer).cast("B")[:nbytes]

    def drop(self, number: int) -> None:
        """Gives the bytes in a segment back without looking at them."""
        if number in self._refused:
            self._spend(number)
        elif number in self._maps and number not in self._in_use:
            self._discard_and_release(number)

    def begin_send_back(self, address: int, nbytes: int) -> int | None:
        """Has the segment that begins at an address go back with its bytes, unless something refers to them then.

        Returns its number, for `end_send_back`. None if that cannot be: it is no segment, or a small part of one,
        or only this worker sees what has been written to it, or something else is to happen to it.
        """
        number = self._numbers.get(address)
        mapped = None if number is None else self._maps.get(number)
        if number is None or mapped is None or mapped.is_private or not _may_send_back(nbytes, mapped.size):
            return None
        if number not in self._in_use or mapped.is_inherited:
            return None
        mine = object()
        return number if self._going_back.setdefault(number, mine) is mine else None

    def end_send_back(self, number: int) -> _Memory | None:
        """Returns None if a segment goes back with its bytes; else the bytes, to which something still refers."""
        buffer = self._in_use.buffer(number)
        if buffer is None and (mapped := self._maps.get(number)) is not None and mapped.is_inherited:
            buffer = mapped.buffer()  # a child has been forked since `begin_send_back`
            self._in_use.begin(number, buffer)
        if buffer is not None:
            self._going_back.pop(number, None)
        return buffer

    def _on_unused(self, number: int) -> None:
        """Has a segment go back to which nothing refers. Called by finalizers."""
        mapped = self._maps.get(number)
        if mapped is not None and mapped.is_inherited:
            if number not in self._going_back:  # else `end_send_back` still needs its bytes
                self._spend(number)
        elif self._going_back.pop(number, None) is None:
            self._discard_and_release(number)

    def take_spent(self) -> tuple[list[int], list[Mapping]]:
        """Removes the segments that are not used any more, and not to be used again.

        Returns their numbers, for their maker, and those that are mapped.
        """
        spent = []
        while self._spent:
            spent.append(self._spent.popleft())
        return spent, self.remove(spent)

    def _discard_and_release(self, number: int) -> None:
        mapped = self._maps.get(number)
        if mapped is not None and mapped.is_private:
            try:
                self._are_written_to |= mapped.discard_writes()
            except OSError as error:
                log.warning("cannot use a segment of %d bytes again: %s", mapped.size, error)
                return
        self.release(number)

    def _spend(self, number: int) -> None:
        self._spent.append(number)
        self._on_released()

    def release(self, number: int) -> None:
        """Has the other worker told of a segment, or another thing, that is not used any more. Takes no lock."""
        self.released.append(number)
        self._on_released()


def _check_segment(number: int, size: int, descriptor: int) -> None:
    """Raises ValueError if a descriptor is no segment of this size, or one that cannot be mapped."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if os.fstat(descriptor).st_size != size or seals & SEALS != SEALS:
            raise ValueError(f"segment {number} has not the size that was announced, or may change it")
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise ValueError(f"segment {number} is no segment: {error}") from None
    if seals & _WRITE_SEALS or mode != os.O_RDWR:
        raise ValueError(f"segment {number} cannot be written to")
