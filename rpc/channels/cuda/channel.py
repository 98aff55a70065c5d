"""The channel for tensors on CUDA devices to a worker of this host: segments of device memory (CUDA IPC).

The sender copies the tensors of a message into a segment on the stream that is current at the call, and goes on
at once. The receiver copies them from there to memory of their own, and gives the segment back when that is
complete. So a tensor may be changed as soon as it is sent, what arrives belongs to the receiver alone, and memory
is exported and mapped once, which takes much longer than copying: a GPU copies its own memory at hundreds of
GB/s.

Segments are made known by the gRPC stream, where the other worker says if it cannot map them. It looks for the
sender's GPU among its own by the UUID, as indices depend on CUDA_VISIBLE_DEVICES. Segments are given back with
those of shared memory, on the unix socket. A new one is used when the receiver has mapped it and given it back for
the first time. Until then, and if that fails, payloads go by way of the host, as small tensors do, and those for
other workers. So no message depends on whether the two processes can share memory.
"""

import logging
import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch

from ....proto.v1 import agent_pb2
from ...contracts.devices import DeviceBuffer, StartedCopy
from ..base import ChannelPeer, PayloadLostError, SegmentLimit, check_size
from ..shared_memory import SharedMemoryChannel
from .devices import FIRST_NUMBER, Devices
from .runtime import DeviceError, DeviceRuntime, ExportedMemory, MappedMemory

__all__ = ["MAX_MAPPED", "CudaIpcChannel", "MappedDeviceSegments"]

MIN_SEGMENT_BYTES = 2 << 20
"""Bytes of the smallest segment; the driver shares no less. The others have twice, four times, … as many."""

ALIGNMENT = 256
"""Bytes: what is copied into a segment begins at multiples of it, as all memory of CUDA does."""

MAX_MAPPED = 1024
"""Segments that are mapped of one other worker."""

RETRY_AFTER_S = 10.0
"""Seconds after which a device is asked again that had no memory."""

MAX_HANDLE_BYTES = 4096
"""Bytes of what a peer says of a segment."""

log = logging.getLogger(__name__)

_DevicePair = tuple[torch.device, torch.device]
"""A device of this worker, and the receiver's device that its tensors go to."""


# The segments that this worker makes.


@final
@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    size: int
    devices: _DevicePair
    memory: ExportedMemory
    is_confirmed: bool = False
    """Whether the receiver has mapped it."""


@final
class _DeviceSegmentPool:
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
        self._free: dict[tuple[_DevicePair, int], list[_Segment]] = defaultdict(list)
        """The segments that may be used, by devices and size. The last one was used last."""
        self._lent: dict[int, _Segment] = {}
        """Those that the receiver has, by number: with a payload, or to map them."""
        self._dropped: dict[int, _Segment] = {}
        """Those that the receiver has been told to unmap."""
        self._unusable: dict[_DevicePair, tuple[float, str]] = {}
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

    def _make(self, devices: _DevicePair, size: int) -> None:
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

    def _is_unusable(self, devices: _DevicePair) -> bool:
        if not self._unusable or devices not in self._unusable:
            return False
        if time.monotonic() < self._unusable[devices][0]:
            return True
        del self._unusable[devices]
        return False

    def _set_unusable(self, devices: _DevicePair, seconds: float, reason: str) -> None:
        here, there = devices
        log.info("tensors on %s go to %s of another worker by way of the host: %s", here, there, reason)
        with self._lock:
            self._unusable[devices] = (time.monotonic() + seconds, f"{here} to {there}: {reason}")


# The segments of the other worker.


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


# Both.


@final
class CudaIpcChannel:
    """The segments between this worker and one other."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, peer: ChannelPeer, devices: Devices, shared_memory: SharedMemoryChannel) -> None:
        """Does nothing with CUDA yet. Segments are given back by the unix socket of `shared_memory`."""
        self._peer = peer
        self._devices = devices
        self._shared_memory = shared_memory
        self._lock = threading.Lock()
        """Guards changes of `_pool`."""
        self._pool: _DeviceSegmentPool | None = None
        self._mapped: MappedDeviceSegments | None = None
        """Changed on the loop only."""
        self._former = 0
        """The highest number of a segment of the last connection that broke: some of what came by it may be read
        after that."""
        self._announced = 0
        """The segments that are to be mapped. Used on the loop only."""

    # Sending: on any thread.

    def send(self, elements: Sequence[torch.Tensor], target: torch.device) -> Sequence[agent_pb2.Payload] | None:
        """Has a device copy the elements of one message into a segment: see `DeviceWriter.put_on_device`."""
        options = self._devices.options
        if not options.ipc or self._devices.is_closed or not self._shared_memory.is_connected:
            return None
        if sum(each.numel() for each in elements) < options.ipc_threshold:
            return None
        pool = self._pool or self._make_pool()
        if pool is None or (sent := pool.put(elements, target)) is None:
            return None
        return [agent_pb2.Payload(cuda_ipc=each) for each in sent]

    def _make_pool(self) -> _DeviceSegmentPool | None:
        devices = self._devices
        with self._lock:
            if not devices.is_closed and self._pool is None:
                segments = self._shared_memory.segments
                if not segments.is_connected:
                    return None
                pool = _DeviceSegmentPool(devices.staging.runtime, devices.limit, self._send_frame, devices.submit)
                segments.on_others_released = pool.take_back
                self._pool = pool
            return self._pool

    def _send_frame(self, frame: agent_pb2.DeviceFrame) -> None:
        self._devices.call_soon(self._peer.send_frame, agent_pb2.Frame(devices=frame))

    # Receiving: on the loop, except where it says so.

    def receive(self, payload: agent_pb2.Payload) -> DeviceBuffer:
        """Returns the bytes in their segment. May be called on any thread."""
        announced = payload.cuda_ipc
        check_size(announced.nbytes, self._devices.channels)
        try:
            if (mapped := self._mapped) is None:
                raise ValueError("malformed payload: a segment of a worker that shares no device memory")
            return mapped.use(announced.number, announced.offset, announced.nbytes)
        except ValueError:
            if announced.number <= self._former:  # a worker's numbers only grow
                raise PayloadLostError("its connection broke before it was read") from None
            raise

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Gives the segment back, unless its bytes are in use. May be called on any thread."""
        if (mapped := self._mapped) is not None:
            mapped.drop(payload.cuda_ipc.number)

    def withdraw(self, payload: agent_pb2.Payload) -> None:
        """Takes back the segment of an envelope that was not sent. May be called on any thread."""
        if (pool := self._pool) is not None:
            pool.take_back([payload.cuda_ipc.number])

    def on_frame(self, devices: agent_pb2.DeviceFrame) -> None:
        """Handles what the peer has to say of segments. Raises ValueError if it announces too many."""
        for segment in devices.segments:
            if self._announced >= MAX_MAPPED:
                raise ValueError(f"it announces more than {MAX_MAPPED} segments of device memory at a time")
            self._announced += 1
            self._devices.executor.submit_urgent(self._map, self._find_mapped(), segment)
        if (pool := self._pool) is not None:
            if devices.refused:
                pool.on_refused(devices.refused, devices.reason)
            pool.on_closed(devices.closed)
        if (mapped := self._mapped) is not None:
            for number in devices.dropped:
                mapped.remove(number)

    def _find_mapped(self) -> MappedDeviceSegments | None:
        segments = self._shared_memory.segments
        if self._mapped is None and not self._devices.is_closed and segments.is_connected:
            self._mapped = MappedDeviceSegments(segments.mapped.release, self._on_unused)
        return self._mapped

    def _map(self, mapped: MappedDeviceSegments | None, segment: agent_pb2.DeviceSegment) -> None:
        """Maps a segment of the peer. Runs on a thread of the executor."""
        try:
            if mapped is None or not self._devices.options.ipc:
                raise DeviceError("this worker shares no device memory with it")
            mapped.check_new(segment.number)
            mapped.add(segment.number, segment.size, self._open(segment))
        except (ValueError, RuntimeError) as error:
            log.info("cannot map device memory of worker %s: %s", self._peer.info.name, error)
            self._send_frame(agent_pb2.DeviceFrame(refused=[segment.number], reason=str(error)))
        finally:
            self._devices.call_soon(self._on_mapped)

    def _on_mapped(self) -> None:
        self._announced -= 1

    def _open(self, segment: agent_pb2.DeviceSegment) -> MappedMemory:
        if segment.number < FIRST_NUMBER or not 0 < segment.size <= 2 * self._devices.channels.max_payload_bytes:
            raise ValueError(f"malformed segment {segment.number} of {segment.size} bytes")
        if len(segment.handle) > MAX_HANDLE_BYTES:
            raise ValueError(f"malformed segment: a handle of {len(segment.handle)} bytes")
        target = torch.device(segment.target)
        if target.type != "cuda" or target.index is None or target.index >= torch.cuda.device_count():
            raise ValueError(f"this worker has no {target}")
        runtime = self._devices.staging.runtime
        # If the GPU is hidden from this process, the target can read its memory if it is a peer.
        device = runtime.find(segment.uuid) or target
        return runtime.open(device, segment.handle, segment.size)

    def _on_unused(self, number: int, memory: MappedMemory) -> None:
        """Has a segment unmapped. Called by finalizers: takes no lock."""
        self._devices.submit(partial(self._unmap, number, memory))

    def _unmap(self, number: int, memory: MappedMemory) -> None:
        try:
            memory.close()
        except RuntimeError as error:
            log.warning("cannot unmap device memory of worker %s: %s", self._peer.info.name, error)
        if self._mapped is not None:
            self._send_frame(agent_pb2.DeviceFrame(closed=[number]))

    # The rest.

    def drop(self, error: Exception) -> None:
        """Frees the segments of the connection, and unmaps the peer's. Tensors that were received stay."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        if (mapped := self._mapped) is not None:
            self._former = mapped.highest  # first: another thread may read at the same time
            self._mapped = None
            mapped.close()
        if isinstance(error, ConnectionError):  # there is no other one
            self._former = 0

    def remove_idle(self) -> None:
        """Has the peer unmap the free segments, if nothing has been sent since the last call."""
        if (pool := self._pool) is not None:
            pool.remove_idle()

    def describe(self) -> str:
        """Returns how tensors on devices travel to the peer; empty if none has been sent by this channel."""
        if (pool := self._pool) is None:
            return ""
        reason = pool.why_unusable()
        return self.name if pool.has_segments() else f"host ({reason})" if reason else "host"
