"""The channel for tensors on CUDA devices between workers of one host: segments of device memory (CUDA IPC).

Segments are made known by the gRPC stream, where the other worker says if it cannot map them. It looks for the
sender's GPU among its own by the UUID, as indices depend on CUDA_VISIBLE_DEVICES. Segments are given back with
those of shared memory, on the unix socket. Small tensors, and those for other workers, go by way of the host.
"""

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, final

import torch

from ....proto.v1 import agent_pb2
from ...contracts.device_payloads import DeviceBuffer
from ...contracts.options import RpcBackendOptions
from ...contracts.worker import WorkerInfo
from ...execution.executor import Executor
from ..base import PayloadLostError, check_size
from ..segment_limit import SegmentLimit
from ..shared_memory.channel import SharedMemoryChannel
from .receiving import MAX_MAPPED, MappedDeviceSegments
from .runtime import DeviceError, DeviceRuntime, MappedMemory
from .sending import FIRST_NUMBER, MAX_SEGMENTS, DeviceSegmentPool
from .staging import DeviceStaging

__all__ = ["CudaIpcChannel"]

IDLE_TIMEOUT_S = 10.0
"""Seconds after which segments are freed that nothing has been sent by."""

CLOSE_TIMEOUT_S = 5.0
"""Seconds that a closing agent waits until its segments are freed."""

MAX_HANDLE_BYTES = 4096
"""Bytes of what a peer says of a segment."""

log = logging.getLogger(__name__)


@final
class CudaIpcChannel:
    """The segments of one agent, in both directions. It is a Channel, and a FrameListener."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        shared_memory: SharedMemoryChannel,
        send: Callable[[int, agent_pb2.Frame], None],
        options: RpcBackendOptions,
        load: Callable[[], DeviceRuntime],
    ) -> None:
        """Does nothing with CUDA yet.

        Args:
            loop: the agent's event loop.
            executor: its threads map and free memory.
            shared_memory: tells which workers have a unix socket, which segments are given back by.
            send: sends a frame to a peer by the gRPC stream. Called on the loop.
            options: what goes by segments, and how much.
            load: returns the runtime of the devices; see DeviceStaging.
        """
        self.staging = DeviceStaging(load, executor.blocking, options.cuda.max_pinned_bytes)
        self._loop = loop
        self._executor = executor
        self._shared_memory = shared_memory
        self._send = send
        self._channels = options.channels
        self._options = options.cuda
        self._limit = SegmentLimit(options.cuda.max_ipc_bytes, MAX_SEGMENTS, FIRST_NUMBER)
        self._lock = threading.Lock()
        """Guards changes of `_pools`."""
        self._pools: dict[int, DeviceSegmentPool] = {}
        """By receiver."""
        self._mapped: dict[int, MappedDeviceSegments] = {}
        """By sender. Changed on the loop only."""
        self._former: dict[int, int] = {}
        """The highest number of a segment of the last connection that broke, by sender: some of what came by it
        may be read after that."""
        self._announced: Counter[int] = Counter()
        """The segments that are to be mapped, by sender. Used on the loop only."""
        self._freeing: set[asyncio.Future[None]] = set()
        self._idle_check: asyncio.TimerHandle | None = None
        self._is_closed = False

    # Sending: on any thread.

    def send(
        self, peer: int, elements: Sequence[torch.Tensor], target: torch.device
    ) -> Sequence[agent_pb2.Payload] | None:
        """Has a device copy the elements of one message into a segment.

        Args:
            peer: the receiver.
            elements: tensors of uint8 with one dimension on one CUDA device.
            target: the receiver's device.

        Returns:
            The descriptions of the payloads; None if they have to go by way of the host.
        """
        if not self._options.ipc or self._is_closed or not self._shared_memory.is_connected(peer):
            return None
        if sum(each.numel() for each in elements) < self._options.ipc_threshold:
            return None
        pool = self._pools.get(peer) or self._make_pool(peer)
        if pool is None or (sent := pool.put(elements, target)) is None:
            return None
        return [agent_pb2.Payload(cuda_ipc=each) for each in sent]

    def _make_pool(self, peer: int) -> DeviceSegmentPool | None:
        with self._lock:
            if not self._is_closed and peer not in self._pools:
                pool = DeviceSegmentPool(
                    self.staging.runtime, self._limit, partial(self._send_frame, peer), self._submit
                )
                if not self._shared_memory.share_credits(peer, pool.take_back):
                    return None  # there is no socket to it
                self._pools[peer] = pool
                self._call_soon(self._start_idle_check)
            return self._pools.get(peer)

    def _send_frame(self, peer: int, frame: agent_pb2.DeviceFrame) -> None:
        self._call_soon(self._send, peer, agent_pb2.Frame(devices=frame))

    # Receiving: on the loop, except where it says so.

    def receive(self, peer: int, payload: agent_pb2.Payload) -> DeviceBuffer:
        """Returns the bytes in their segment. May be called on any thread.

        Raises:
            PayloadLostError: its connection broke before this was read.
            ValueError: there is no such segment, or it is smaller.
        """
        announced = payload.cuda_ipc
        check_size(announced.nbytes, self._channels)
        try:
            if (mapped := self._mapped.get(peer)) is None:
                raise ValueError("malformed payload: a segment of a worker that shares no device memory")
            return mapped.lease(announced.number, announced.offset, announced.nbytes)
        except ValueError:
            if announced.number <= self._former.get(peer, 0):  # a worker's numbers only grow
                raise PayloadLostError("its connection broke before it was read") from None
            raise

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Gives the segment back, unless its bytes are in use. May be called on any thread."""
        if (mapped := self._mapped.get(peer)) is not None:
            mapped.drop(payload.cuda_ipc.number)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns False: the receiver can look at the segment."""
        return False

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Takes back the segment of an envelope that was not sent. May be called on any thread."""
        if (pool := self._pools.get(peer)) is not None:
            pool.take_back([payload.cuda_ipc.number])

    def on_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Handles what a peer has to say of segments. Raises ValueError if it announces too many."""
        if not frame.HasField("devices"):
            return
        devices = frame.devices
        for segment in devices.segments:
            if self._announced[peer] >= MAX_MAPPED:
                raise ValueError(f"it announces more than {MAX_MAPPED} segments of device memory at a time")
            self._announced[peer] += 1
            self._executor.submit_urgent(self._map, peer, self._mapped_of(peer), segment)
        if (pool := self._pools.get(peer)) is not None:
            if devices.refused:
                pool.on_refused(devices.refused, devices.reason)
            pool.on_closed(devices.closed)
        if (mapped := self._mapped.get(peer)) is not None:
            for number in devices.dropped:
                mapped.remove(number)

    def _mapped_of(self, peer: int) -> MappedDeviceSegments | None:
        if peer not in self._mapped and not self._is_closed:
            release = self._shared_memory.releaser(peer)
            if release is None:
                return None
            self._mapped[peer] = MappedDeviceSegments(release, partial(self._on_unused, peer))
        return self._mapped.get(peer)

    def _map(self, peer: int, mapped: MappedDeviceSegments | None, segment: agent_pb2.DeviceSegment) -> None:
        """Maps a segment of a peer. Runs on a thread of the executor."""
        try:
            if mapped is None or not self._options.ipc:
                raise DeviceError("this worker shares no device memory with it")
            mapped.check_new(segment.number)
            mapped.add(segment.number, segment.size, self._open(segment))
        except (ValueError, RuntimeError) as error:
            log.info("cannot map device memory of worker %d: %s", peer, error)
            self._send_frame(peer, agent_pb2.DeviceFrame(refused=[segment.number], reason=str(error)))
        finally:
            self._call_soon(self._announced.subtract, (peer,))

    def _open(self, segment: agent_pb2.DeviceSegment) -> MappedMemory:
        if segment.number < FIRST_NUMBER or not 0 < segment.size <= 2 * self._channels.max_payload_bytes:
            raise ValueError(f"malformed segment {segment.number} of {segment.size} bytes")
        if len(segment.handle) > MAX_HANDLE_BYTES:
            raise ValueError(f"malformed segment: a handle of {len(segment.handle)} bytes")
        target = torch.device(segment.target)
        if target.type != "cuda" or target.index is None or target.index >= torch.cuda.device_count():
            raise ValueError(f"this worker has no {target}")
        runtime = self.staging.runtime
        # If the GPU is hidden from this process, the target can read its memory if it is a peer.
        device = runtime.find(segment.uuid) or target
        return runtime.open(device, segment.handle, segment.size)

    def _on_unused(self, peer: int, number: int, memory: MappedMemory) -> None:
        """Has a segment unmapped. Called by finalizers: takes no lock."""
        self._submit(partial(self._unmap, peer, number, memory))

    def _unmap(self, peer: int, number: int, memory: MappedMemory) -> None:
        try:
            memory.close()
        except RuntimeError as error:
            log.warning("cannot unmap device memory of worker %d: %s", peer, error)
        if peer in self._mapped:
            self._send_frame(peer, agent_pb2.DeviceFrame(closed=[number]))

    # The rest. Called on the loop.

    def drop_peer(self, peer: int, reason: str) -> None:  # noqa: ARG002
        """Frees the segments for a lost peer, and unmaps its own. Tensors that were received from it stay."""
        self._drop_segments(peer)
        self._former.pop(peer, None)

    def drop_connection(self, peer: int, reason: str) -> None:  # noqa: ARG002
        """Does the same for a peer that may come back: there are others when there is another socket to it."""
        self._drop_segments(peer)

    def _drop_segments(self, peer: int) -> None:
        with self._lock:
            pool = self._pools.pop(peer, None)
        if pool is not None:
            pool.close()
        if (mapped := self._mapped.get(peer)) is not None:
            self._former[peer] = mapped.highest  # first: another thread may read at the same time
            self._mapped.pop(peer, None)
            mapped.close()

    async def close(self) -> None:
        """Frees all segments."""
        self._is_closed = True
        if self._idle_check is not None:
            self._idle_check.cancel()
        for peer in {*self._pools, *self._mapped}:
            self.drop_peer(peer, "this worker shuts down")
        await asyncio.sleep(0)  # what has been submitted begins
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=CLOSE_TIMEOUT_S)

    def figures(self, workers: Iterable[WorkerInfo]) -> Mapping[str, object]:
        """Returns how tensors on devices travel to workers that some were sent to, and memory in use in bytes."""
        described = ((worker.name, self._describe(worker.wire_id)) for worker in workers)
        return {
            "channels": {name: how for name, how in described if how},
            "ipc_bytes": self._limit.used,
            "pinned_bytes": self.staging.pinned_bytes,
        }

    def _describe(self, peer: int) -> str:
        """Returns how tensors on devices travel to a peer; empty if none has been sent by this channel."""
        if (pool := self._pools.get(peer)) is None:
            return ""
        reason = pool.why_unusable()
        return self.name if pool.has_segments() else f"host ({reason})" if reason else "host"

    def _submit(self, task: Callable[[], None]) -> None:
        """Runs a task on a thread of the executor. Called on any thread, also by finalizers."""
        self._call_soon(self._start, task)

    def _start(self, task: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._freeing.add(done)

        def run() -> None:
            try:
                task()
            finally:
                self._call_soon(self._on_freed, done)

        self._executor.submit_urgent(run)

    def _on_freed(self, done: "asyncio.Future[None]") -> None:
        self._freeing.discard(done)
        if not done.done():
            done.set_result(None)

    def _call_soon(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *args)

    def _start_idle_check(self) -> None:
        if self._idle_check is None and not self._is_closed:
            self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._remove_idle)

    def _remove_idle(self) -> None:
        self._idle_check = self._loop.call_later(IDLE_TIMEOUT_S, self._remove_idle)
        for pool in list(self._pools.values()):
            pool.remove_idle()
