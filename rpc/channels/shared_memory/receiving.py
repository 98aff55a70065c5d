"""The segments of shared memory that another worker has made for this one."""

import errno
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Collection
from typing import final

import numpy as np

from .buffers_in_use import BuffersInUse, Memory
from .mapping import MAX_SEGMENTS, SEALS, WRITE_SEALS, Mapping, may_send_back

__all__ = ["MappedSegments"]

log = logging.getLogger(__name__)


def _check_segment(number: int, size: int, descriptor: int) -> None:
    """Raises ValueError if a descriptor is no segment of this size, or one that cannot be mapped."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if os.fstat(descriptor).st_size != size or seals & SEALS != SEALS:
            raise ValueError(f"segment {number} has not the size that was announced, or may change it")
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise ValueError(f"segment {number} is no segment: {error}") from None
    if seals & WRITE_SEALS or mode != os.O_RDWR:
        raise ValueError(f"segment {number} cannot be written to")


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
        """Has mapped nothing yet.

        Args:
            max_bytes: of all segments that are mapped at a time.
            on_released: called when there is something in `released`, or for `take_spent`. Finalizers call it: it
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
        self._in_use = BuffersInUse(self._on_unused)
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

        Raises:
            ValueError: the descriptor is no segment of this size, or the number is in use.
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
            return self._copy(number, memoryview(mapped.buffer()).cast("B")[:nbytes])
        buffer = mapped.buffer()
        self._in_use.begin(number, buffer)
        return memoryview(buffer).cast("B")[:nbytes]

    def drop(self, number: int) -> None:
        """Gives the bytes in a segment back without looking at them."""
        if number in self._refused:
            self._spend(number)
        elif number in self._maps and number not in self._in_use:
            self._release(number)

    def begin_send_back(self, address: int, nbytes: int) -> int | None:
        """Has the segment that begins at an address go back with its bytes, unless something refers to them then.

        Returns:
            Its number, for `end_send_back`. None if that cannot be: it is no segment, or a small part of one, or
            only this worker sees what has been written to it, or something else is to happen to it.
        """
        number = self._numbers.get(address)
        mapped = None if number is None else self._maps.get(number)
        if number is None or mapped is None or mapped.is_private or not may_send_back(nbytes, mapped.size):
            return None
        if number not in self._in_use or self._in_use.is_pinned(number):
            return None
        mine = object()
        return number if self._going_back.setdefault(number, mine) is mine else None

    def end_send_back(self, number: int) -> Memory | None:
        """Returns None if a segment goes back with its bytes; else the bytes, to which something still refers."""
        buffer = self._in_use.buffer(number)
        if buffer is None and self._in_use.is_pinned(number) and (mapped := self._maps.get(number)) is not None:
            buffer = mapped.buffer()  # a child has been forked since `begin_send_back`
            self._in_use.begin(number, buffer)
        if buffer is not None:
            self._going_back.pop(number, None)
        return buffer

    def abort_send_back(self, number: int) -> None:
        """Has a segment go back without its bytes, after `end_send_back`, because the message is not sent."""
        self._return(number)

    def _on_unused(self, number: int) -> None:
        """Has a segment go back to which nothing refers. Called by finalizers."""
        if self._in_use.is_pinned(number):
            if number not in self._going_back:  # else `end_send_back` still needs its bytes
                self._spend(number)
        elif self._going_back.pop(number, None) is None:
            self._release(number)

    def take_spent(self) -> tuple[list[int], list[Mapping]]:
        """Removes the segments that are not used any more, and not to be used again.

        Returns their numbers, for their maker, and those that are mapped.
        """
        spent = []
        while self._spent:
            spent.append(self._spent.popleft())
            self._in_use.discard(spent[-1])
        return spent, self.remove(spent)

    def _release(self, number: int) -> None:
        mapped = self._maps.get(number)
        if mapped is not None and mapped.is_private:
            try:
                self._are_written_to |= mapped.discard_writes()
            except OSError as error:
                log.warning("cannot use a segment of %d bytes again: %s", mapped.size, error)
                return
        self._return(number)

    def _copy(self, number: int, data: memoryview) -> memoryview:
        copied = np.frombuffer(data, dtype=np.uint8).copy()
        self._return(number)
        return copied.data

    def _spend(self, number: int) -> None:
        self._spent.append(number)
        self._on_released()

    def _return(self, number: int) -> None:
        self.released.append(number)
        self._on_released()
