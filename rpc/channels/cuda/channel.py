"""The channel for tensors on CUDA devices to a worker of this host: segments of device memory (CUDA IPC).

Segments are made known by the gRPC stream, where the other worker says if it cannot map them. It looks for the
sender's GPU among its own by the UUID, as indices depend on CUDA_VISIBLE_DEVICES. Segments are given back with
those of shared memory, on the unix socket. Small tensors, and those for other workers, go by way of the host.
"""

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, final

import torch

from ....proto.v1 import agent_pb2
from ...contracts.devices import DeviceBuffer
from ..base import ChannelPeer, PayloadLostError, check_size
from ..shared_memory import SharedMemoryChannel
from .devices import Devices
from .runtime import DeviceError, MappedMemory
from .segments import FIRST_NUMBER, MAX_MAPPED, DeviceSegmentPool, MappedDeviceSegments

__all__ = ["CudaIpcChannel"]

MAX_HANDLE_BYTES = 4096
"""Bytes of what a peer says of a segment."""

log = logging.getLogger(__name__)


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
        self._pool: DeviceSegmentPool | None = None
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

    def _make_pool(self) -> DeviceSegmentPool | None:
        devices = self._devices
        with self._lock:
            if not devices.is_closed and self._pool is None:
                segments = self._shared_memory.segments
                if not segments.is_connected:
                    return None
                pool = DeviceSegmentPool(devices.staging.runtime, devices.limit, self._send_frame, devices.submit)
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
