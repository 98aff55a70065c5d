"""The segments of device memory of two workers: those that this one makes for the other, and those of the other.

The sender copies the tensors of a message into a segment on the stream that is current at the call, and goes on
at once. The receiver copies them from there to memory of their own, and gives the segment back when that is
complete. So a tensor may be changed as soon as it is sent, what arrives belongs to the receiver alone, and memory
is exported and mapped once, which takes much longer than copying: a GPU copies its own memory at hundreds of
GB/s.

A new segment is used when the receiver has mapped it and given it back for the first time. Until then, and if
that fails, payloads go by way of the host. So no message depends on whether the two processes can share memory.
"""

import logging
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from ....proto.v1 import agent_pb2
from ...contracts.devices import StartedCopy
from ..base import SegmentLimit
from .runtime import DeviceRuntime, ExportedMemory, MappedMemory

__all__ = ["FIRST_NUMBER", "MAX_MAPPED", "MAX_SEGMENTS", "DeviceSegmentPool", "MappedDeviceSegments"]

MIN_SEGMENT_BYTES = 2 << 20
"""Bytes of the smallest segment; the driver shares no less. The others have twice, four times, … as many."""

ALIGNMENT = 256
"""Bytes: what is copied into a segment begins at multiples of it, as all memory of CUDA does."""

MAX_SEGMENTS = 1024
"""Segments of one agent. Each has an event that is shared, of which a process can have some 20,000."""

FIRST_NUMBER = 1 << 62
"""Of the segments. Those of shared memory have smaller numbers, as both are given back in the same frames."""

MAX_MAPPED = 1024
"""Segments that are mapped of one other worker."""

RETRY_AFTER_S = 10.0
"""Seconds after which a device is asked again that had no memory."""

log = logging.getLogger(__name__)

Devices = tuple[torch.device, torch.device]
"""A device of this worker, and the receiver's device that its tensors go to."""


@final
@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    size: int
    devices: Devices
    memory: ExportedMemory
    is_confirmed: bool = False
    """Whether the receiver has mapped it."""


@final
class DeviceSegmentPool:
    """The segments for one other worker. Safe to use from any thread."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        limit: SegmentLimit,
        send: Callable[[agent_pb2.DeviceFrame], None],
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        """Makes no segment yet. The pools of this worker share the limit.

        `send` sends a frame to the other worker; `submit` runs what may wait for a device on another thread.
        """
        self._runtime = runtime
        self._limit = limit
        self._send = send
        self._submit = submit
        self._lock = threading.Lock()
        self._free: dict[tuple[Devices, int], list[_Segment]] = defaultdict(list)
        """The segments that may be used, by devices and size. The last one was used last."""
        self._lent: dict[int, _Segment] = {}
        """Those that the receiver has, by number: with a payload, or to map them."""
        self._dropped: dict[int, _Segment] = {}
        """Those that the receiver has been told to unmap."""
        self._unusable: dict[Devices, tuple[float, str]] = {}
        """Until when, by the monotonic clock, and why nothing is made for these devices."""
        self._is_closed = False
        self._was_used = False

    def why_unusable(self) -> str:
        """Returns why some devices use no segments, for people; empty if they may."""
        return "; ".join(reason for _, reason in list(self._unusable.values()))

    def has_segments(self) -> bool:
        """Returns whether the receiver has mapped some."""
        with self._lock:
            return any(self._free.values()) or any(each.is_confirmed for each in self._lent.values())

    def put(
        self, elements: Sequence[torch.Tensor], target: torch.device
    ) -> Sequence[agent_pb2.DevicePayload] | None:
        """Has the device copy elements into one segment, which the receiver then owns.

        Returns:
            The descriptions of the payloads; None if no segment can be used now. One is made in that case.
        """
        begins, nbytes = [], 0
        for each in elements:
            begins.append(nbytes)
            nbytes += -(-each.numel() // ALIGNMENT) * ALIGNMENT
        size = max(MIN_SEGMENT_BYTES, 1 << (nbytes - 1).bit_length())
        devices = (elements[0].device, target)
        self._was_used = True
        with self._lock:
            if self._is_closed or self._is_unusable(devices):
                return None
            if free := self._free.get((devices, size)):
                segment = free.pop()
                self._lent[segment.number] = segment
            elif any(not s.is_confirmed and (s.devices, s.size) == (devices, size) for s in self._lent.values()):
                return None
            else:
                segment = None
        if segment is None:
            self._make(devices, size)
            return None
        try:
            segment.memory.fill(list(zip(begins, elements, strict=True)))
        except RuntimeError as error:
            self._set_unusable(devices, RETRY_AFTER_S, str(error))
            self.take_back([segment.number])
            return None
        return [
            agent_pb2.DevicePayload(number=segment.number, nbytes=each.numel(), offset=begin)
            for begin, each in zip(begins, elements, strict=True)
        ]

    def _make(self, devices: Devices, size: int) -> None:
        """Makes a segment, and tells the receiver of it."""
        if (number := self._limit.acquire(size)) is None:
            return
        try:
            memory = self._runtime.export(devices[0], size)
            uuid = self._runtime.uuid(devices[0])
        except RuntimeError as error:
            self._limit.release([size])
            self._set_unusable(devices, RETRY_AFTER_S, str(error))
            return
        segment = _Segment(number, size, devices, memory)
        with self._lock:
            if not (is_closed := self._is_closed):
                self._lent[number] = segment
        if is_closed:
            self._release([segment])
            return
        described = agent_pb2.DeviceSegment(
            number=number, size=size, handle=memory.handle, uuid=uuid, target=str(devices[1])
        )
        self._send(agent_pb2.DeviceFrame(segments=[described]))

    def take_back(self, numbers: Iterable[int]) -> None:
        """Takes back segments that the receiver has mapped, or has copied from. Numbers of others are ignored."""
        with self._lock:
            for number in numbers:
                if (segment := self._lent.pop(number, None)) is not None:
                    segment.is_confirmed = True
                    self._free[segment.devices, segment.size].append(segment)

    def on_refused(self, numbers: Sequence[int], reason: str) -> None:
        """Frees segments that the receiver cannot map, and makes none for their devices any more."""
        refused = []
        with self._lock:
            for number in numbers:
                segment = self._lent.get(number)
                if segment is not None and not segment.is_confirmed:
                    refused.append(self._lent.pop(number))
        for segment in refused:
            self._set_unusable(segment.devices, math.inf, reason)
        self._release(refused)

    def on_closed(self, numbers: Sequence[int]) -> None:
        """Frees segments that the receiver has unmapped."""
        with self._lock:
            closed = [each for number in numbers if (each := self._dropped.pop(number, None)) is not None]
        self._release(closed)

    def remove_idle(self) -> None:
        """Has the receiver unmap the free segments, if nothing has been put since the last call."""
        was_used, self._was_used = self._was_used, False
        with self._lock:
            dropped = [] if was_used else [each for segments in self._free.values() for each in segments]
            if not dropped:
                return
            self._free.clear()
            self._dropped.update((segment.number, segment) for segment in dropped)
        self._send(agent_pb2.DeviceFrame(dropped=[segment.number for segment in dropped]))

    def close(self) -> None:
        """Frees all segments. The receiver is gone."""
        with self._lock:
            self._is_closed = True
            free = [each for segments in self._free.values() for each in segments]
            all_of_them = [*free, *self._lent.values(), *self._dropped.values()]
            self._free.clear()
            self._lent.clear()
            self._dropped.clear()
        self._release(all_of_them)

    def _release(self, segments: Sequence[_Segment]) -> None:
        if not segments:
            return

        def free() -> None:
            for segment in segments:
                try:
                    segment.memory.free()
                except RuntimeError as error:
                    log.warning("cannot free %d bytes of %s: %s", segment.size, segment.devices[0], error)
                self._limit.release([segment.size])

        self._submit(free)

    def _is_unusable(self, devices: Devices) -> bool:
        if not self._unusable or devices not in self._unusable:
            return False
        if time.monotonic() < self._unusable[devices][0]:
            return True
        del self._unusable[devices]
        return False

    def _set_unusable(self, devices: Devices, seconds: float, reason: str) -> None:
        here, there = devices
        log.info("tensors on %s go to %s of another worker by way of the host: %s", here, there, reason)
        with self._lock:
            self._unusable[devices] = (time.monotonic() + seconds, f"{here} to {there}: {reason}")


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
class _SegmentPart:
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

    def use(self, number: int, offset: int, nbytes: int) -> _SegmentPart:
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
        return _SegmentPart(use, offset, nbytes)

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
