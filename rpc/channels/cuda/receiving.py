"""The segments of device memory that another worker has made for this one."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from ...contracts.devices import StartedCopy
from .runtime import MappedMemory

__all__ = ["MAX_MAPPED", "MappedDeviceSegments", "SegmentPart"]

MAX_MAPPED = 1024
"""Segments that are mapped of one other worker."""


@final
@dataclass(slots=True, eq=False)
class _Mapped:
    """A segment, which is unmapped when nothing refers to it any more."""

    number: int
    size: int
    memory: MappedMemory
    on_unused: Callable[[int, MappedMemory], None]
    use: "weakref.ref[_SegmentUse] | None" = None
    """What the payloads in it share that have not been copied yet."""

    def __del__(self) -> None:
        self.on_unused(self.number, self.memory)


@final
@dataclass(slots=True, eq=False, weakref_slot=True)
class _SegmentUse:
    """A segment with payloads. It goes back when nothing refers to this object."""

    mapped: _Mapped
    release: Callable[[int], None]

    def __del__(self) -> None:
        self.release(self.mapped.number)


@final
@dataclass(slots=True, eq=False)
class SegmentPart:
    """The bytes of one payload in a segment: a DeviceBuffer."""

    use: _SegmentUse
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def copy_to(self, target: torch.Tensor) -> StartedCopy:
        """Starts to copy the bytes. The copy keeps the segment until it is complete."""
        return _PartCopy(self.use.mapped.memory.copy_to(target, self.offset), self.use)


@final
@dataclass(slots=True, eq=False)
class _PartCopy:
    """A copy. Its segment goes back if it was the last one."""

    copy: StartedCopy
    use: _SegmentUse | None

    def is_complete(self) -> bool:
        if not self.copy.is_complete():
            return False
        self.use = None
        return True

    def wait(self) -> None:
        self.copy.wait()
        self.use = None


@final
class MappedDeviceSegments:
    """The segments of one other worker. Safe to use from any thread."""

    def __init__(self, release: Callable[[int], None], on_unused: Callable[[int, MappedMemory], None]) -> None:
        """Has mapped nothing yet. Finalizers call both functions: they must take no lock.

        Args:
            release: tells the other worker that a segment is mapped, or not used any more, by its number.
            on_unused: takes the number and the memory of a segment that has to be unmapped.
        """
        self._release = release
        self._on_unused = on_unused
        self._lock = threading.Lock()
        self._segments: dict[int, _Mapped] = {}
        self.highest = 0
        """The highest number of a segment that was added."""
        self._is_closed = False

    def check_new(self, number: int) -> None:
        """Raises ValueError if no segment of this number can be added."""
        if number in self._segments or len(self._segments) >= MAX_MAPPED:
            raise ValueError(f"segment {number} is there already, or one too many")

    def add(self, number: int, size: int, memory: MappedMemory) -> None:
        """Adds a segment that is mapped, and tells the other worker that it may use it."""
        mapped = _Mapped(number, size, memory, self._on_unused)
        with self._lock:
            if self._is_closed:
                return
            self._segments[number] = mapped
            self.highest = max(self.highest, number)
        self._release(number)

    def remove(self, number: int) -> None:
        """Removes a segment, which is unmapped when no copy from it is in flight."""
        with self._lock:
            removed = self._segments.pop(number, None)
        del removed  # without the lock: it may be unmapped now

    def use(self, number: int, offset: int, nbytes: int) -> SegmentPart:
        """Returns the bytes of a payload. The segment goes back when no part of it is in use any more.

        Raises ValueError if there is no such segment, or it is smaller.
        """
        with self._lock:
            mapped = self._segments.get(number)
            if mapped is None or nbytes < 1 or not offset + nbytes <= mapped.size:
                raise ValueError(
                    f"malformed payload: {nbytes} bytes at {offset} in segment {number} of device memory"
                )
            use = mapped.use() if mapped.use is not None else None
            if use is None:
                use = _SegmentUse(mapped, self._release)
                mapped.use = weakref.ref(use)
        return SegmentPart(use, offset, nbytes)

    def drop(self, number: int) -> None:
        """Gives a segment back without looking at its bytes, unless some of them are in use."""
        with self._lock:
            mapped = self._segments.get(number)
            is_unused = mapped is not None and (mapped.use is None or mapped.use() is None)
        if is_unused:
            self._release(number)

    def close(self) -> None:
        """Removes all segments: the other worker is gone."""
        with self._lock:
            self._is_closed = True
            removed, self._segments = self._segments, {}
        removed.clear()
