"""CUDA devices in host memory, for machines without a GPU.

`FakeGpus` is a DeviceRuntime. Its devices are pieces of the host's memory: a tensor whose elements are in one
says that it is on that CUDA device, and does not tell NumPy its elements, as tensors on GPUs do. Memory that is
exported is a memfd, which other processes map, and whose copies are ordered by events that both processes see.
The stream of a device can be stalled, so that a test sees who waits for it.
"""

import json
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gradwire import rpc
from gradwire.extensions import DEFAULT_EXTENSIONS
from gradwire.rpc import grpc_backend
from gradwire.rpc.agent.grpc_agent import AgentFactories, GrpcAgent
from gradwire.rpc.agent.network import Network, NetworkSeams
from gradwire.rpc.channels.cuda.runtime import DeviceError
from gradwire.rpc.contracts.worker import Member
from gradwire.rpc.wire.tensor_memory import span

from tests.workers import TRANSPORTS, Worker

BACKEND = "FAKE_CUDA"

_COUNTS = struct.Struct("<QQ")
"""Behind the bytes of exported memory: how often it has been filled by a call, and by its device."""


TENSOR: Any = torch._C.TensorBase
"""Has the attributes of tensors that `install` replaces."""


class Memory:
    """Which addresses belong to which device, in this process."""

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, torch.device]] = {}

    def tensor(self, buffer: Any, nbytes: int, device: torch.device) -> torch.Tensor:
        """Returns a tensor on a device, in the memory of a buffer."""
        array = np.frombuffer(buffer, np.uint8, nbytes)
        start = array.ctypes.data
        self.ranges[start] = (start + nbytes, device)
        weakref.finalize(array, self.ranges.pop, start, None).atexit = False
        return torch.from_numpy(array)

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """Returns the device of a tensor, if it is on one of these."""
        if not self.ranges or TENSOR.layout.__get__(tensor) is not torch.strided:
            return None
        try:
            address = TENSOR.data_ptr(tensor)
        except RuntimeError:
            return None
        for start, (end, device) in list(self.ranges.items()):
            if start <= address < end:
                return device
        return None


class FakeCopy:
    """A copy that begins when its stream and its event allow, at the latest when it is waited for."""

    def __init__(self, wait: Callable[[], None], is_complete: Callable[[], bool] = bool) -> None:
        self.wait = wait
        self.is_complete = is_complete


class FakeExported:
    def __init__(self, gpus: "FakeGpus", device: torch.device, nbytes: int) -> None:
        self.gpus = gpus
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("fake-gpu")
        os.ftruncate(self.descriptor, nbytes + _COUNTS.size)
        self.map = mmap.mmap(self.descriptor, nbytes + _COUNTS.size)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8, count=nbytes)
        self.wake, self.woken = os.pipe()[::-1]
        where = {"pid": os.getpid(), "memory": self.descriptor, "event": self.woken, "uuid": gpus.uuid(device)}
        self.handle = json.dumps(where).encode()
        gpus.exported.append(self)

    def counts(self) -> tuple[int, int]:
        return _COUNTS.unpack_from(self.map, self.nbytes)

    def fill(self, elements: Sequence[tuple[int, torch.Tensor]]) -> None:
        if self.gpus.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        called, done = self.counts()
        _COUNTS.pack_into(self.map, self.nbytes, called + 1, done)
        self.gpus.enqueue(partial(self._fill, elements))

    def _fill(self, elements: Sequence[tuple[int, torch.Tensor]]) -> None:
        for begin, each in elements:
            self.bytes[begin : begin + each.numel()] = each
        called, done = self.counts()
        _COUNTS.pack_into(self.map, self.nbytes, called, done + 1)
        os.write(self.wake, b".")

    def free(self) -> None:
        self.gpus.is_released.wait(60)
        self.gpus.exported.remove(self)
        self.gpus.freed.release()
        for descriptor in (self.descriptor, self.wake, self.woken):
            os.close(descriptor)


class FakeMapped:
    def __init__(self, gpus: "FakeGpus", where: dict[str, Any], nbytes: int) -> None:
        self.gpus = gpus
        self.nbytes = nbytes
        try:
            descriptor = os.open(f"/proc/{where['pid']}/fd/{where['memory']}", os.O_RDWR)
            self.event = os.open(f"/proc/{where['pid']}/fd/{where['event']}", os.O_RDONLY)
        except OSError as error:
            raise DeviceError(str(error)) from None
        self.map = mmap.mmap(descriptor, nbytes + _COUNTS.size)
        os.close(descriptor)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8, count=nbytes)
        gpus.mapped.append(self)

    def copy_to(self, target: torch.Tensor, offset: int) -> FakeCopy:
        called, _ = _COUNTS.unpack_from(self.map, self.nbytes)

        def is_complete() -> bool:
            if _COUNTS.unpack_from(self.map, self.nbytes)[1] < called:
                return False
            target.copy_(self.bytes[offset : offset + target.numel()])
            self.gpus.copied_bytes += target.numel()
            return True

        def wait() -> None:
            self.gpus.began_to_wait.set()
            while not is_complete():
                if not os.read(self.event, 1):
                    raise RuntimeError("the process that fills the memory has ended")

        return FakeCopy(wait, is_complete)

    def close(self) -> None:
        self.gpus.mapped.remove(self)
        self.gpus.unmapped.release()
        os.close(self.event)


class FakeGpus:
    """The devices of one process."""

    def __init__(self, uuids: Sequence[str], *, can_export: bool = True, can_open: bool = True) -> None:
        """Makes a device for each UUID, in the order in which this process sees them.

        Args:
            uuids: of the devices.
            can_export: whether memory can be shared.
            can_open: whether memory of other processes can be mapped.
        """
        self.uuids = list(uuids)
        self.can_export = can_export
        self.can_open = can_open
        self.is_broken = False
        self.peers: set[str] = set()
        """Other devices whose memory these ones can reach."""
        self.memory = Memory()
        self.exported: list[FakeExported] = []
        self.mapped: list[FakeMapped] = []
        self.freed, self.unmapped = threading.Semaphore(0), threading.Semaphore(0)
        self.copied_bytes = 0
        """Of memory of other processes."""
        self.staged_bytes = 0
        """Between devices and the host."""
        self.began_to_wait = threading.Event()
        self.stalled: list[Callable[[], None]] | None = None
        self.is_released = threading.Event()
        self.is_released.set()

    # What a test does with streams.

    def stall(self) -> None:
        """Has the stream stop, as if a kernel ran for long."""
        self.is_released.clear()
        self.stalled = []

    def enqueue(self, task: Callable[[], None]) -> None:
        """Runs a task when the stream comes to it."""
        if self.stalled is None:
            task()
        else:
            self.stalled.append(task)

    def release(self) -> None:
        """Has the stream go on."""
        stalled, self.stalled = self.stalled or [], None
        for task in stalled:
            task()
        self.is_released.set()

    # DeviceRuntime.

    def uuid(self, device: torch.device) -> str:
        return self.uuids[device.index]

    def find(self, uuid: str) -> torch.device | None:
        return torch.device("cuda", self.uuids.index(uuid)) if uuid in self.uuids else None

    def is_idle(self, device: torch.device) -> bool:
        return self.stalled is None

    def export(self, device: torch.device, nbytes: int) -> FakeExported:
        if not self.can_export:
            raise DeviceError("cuIpcGetMemHandle failed with CUDA_ERROR_NOT_SUPPORTED")
        return FakeExported(self, device, nbytes)

    def open(self, device: torch.device, handle: bytes, nbytes: int) -> FakeMapped:
        where = json.loads(handle)
        if not self.can_open or where.get("uuid") not in {self.uuid(device), *self.peers}:
            raise DeviceError("cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        return FakeMapped(self, where, nbytes)

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        return self.memory.tensor(mmap.mmap(-1, nbytes), nbytes, device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> FakeCopy:
        done = threading.Event()

        def copy() -> None:
            target.copy_(source)
            self.staged_bytes += target.numel()
            done.set()

        self.enqueue(copy)
        return FakeCopy(lambda: None if done.wait(60) else self.fail(), done.is_set)

    def fail(self) -> None:
        raise RuntimeError("the stream stands still")

    def put(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """Returns a copy of a tensor on a device."""
        copy = self.empty(torch.device(device), tensor.nbytes)
        copy.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        return copy.view(tensor.dtype).view(tensor.shape)


gpus: FakeGpus
"""Those of this worker process."""


def install(uuids: Sequence[str], **options: Any) -> FakeGpus:
    """Gives this process devices, for the rest of its life."""
    global gpus
    gpus = FakeGpus(uuids, **options)
    device_of = gpus.memory.device_of

    def empty_strided(size: Any, stride: Any, *, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        if (device := torch.device(device)).type != "cuda":
            return torch._C._VariableFunctions.empty_strided(size, stride, dtype=dtype, device=device)
        flat = gpus.empty(device, span(size, stride) * dtype.itemsize).view(dtype)
        return flat.as_strided(size, stride)

    def numpy(tensor: torch.Tensor, **more: Any) -> Any:
        if (device := device_of(tensor)) is not None:
            raise TypeError(f"can't convert {device} device type tensor to numpy")
        return TENSOR.numpy(tensor, **more)

    torch.Tensor.device = property(lambda t: device_of(t) or TENSOR.device.__get__(t))
    torch.Tensor.is_cuda = property(lambda t: device_of(t) is not None)
    torch.Tensor.is_cpu = property(lambda t: device_of(t) is None and TENSOR.is_cpu.__get__(t))
    torch.Tensor.cpu = lambda t: TENSOR.clone(t) if device_of(t) is not None else TENSOR.cpu(t)
    torch.Tensor.numpy = numpy
    torch.empty_strided = empty_strided
    torch.cuda.device_count = lambda: len(gpus.uuids)
    return gpus


def _start(**arguments: Any) -> GrpcAgent:
    factories = AgentFactories(network=partial(Network, seams=NetworkSeams(load_devices=lambda: gpus)))
    make_agent = partial(GrpcAgent, extensions=DEFAULT_EXTENSIONS, factories=factories)
    with patch.object(grpc_backend, "Member", partial(Member, device_count=len(gpus.uuids))):
        return grpc_backend.start_agent(**arguments, make_agent=make_agent)


def _init(name: str, rank: int, size: int, url: str, options: dict[str, Any]) -> None:
    if not rpc.backend_registered(BACKEND):
        rpc.register_backend(BACKEND, lambda *_args, **_more: rpc.RpcBackendOptions(), _start)
    options = {"transports": TRANSPORTS, **options}
    chosen = rpc.RpcBackendOptions(init_method=url, **options)
    rpc.init_rpc(name, BACKEND, rank=rank, world_size=size, rpc_backend_options=chosen)


def join(
    workers: Any,
    uuids: Sequence[Sequence[str]],
    device_maps: Sequence[dict[str, Any]],
    gpu_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[Worker]:
    """Starts workers with fake GPUs in an RPC group.

    Args:
        workers: the fixture.
        uuids: for each worker, those of the devices that it sees.
        device_maps: for each worker, its device maps.
        gpu_options: of FakeGpus, for the last worker.
        options: of RpcBackendOptions, for all.
    """
    started = workers(len(uuids))
    url = f"file://{workers.folder / 'rendezvous'}"
    for worker, visible in zip(started, uuids, strict=True):
        worker.run(_install, visible, (gpu_options or {}) if worker is started[-1] else {})
    pending = [
        worker.start(_init, worker.name, rank, len(started), url, {**options, "device_maps": device_map})
        for rank, (worker, device_map) in enumerate(zip(started, device_maps, strict=True))
    ]
    for each in pending:
        each.result()
    return started


def _install(uuids: Sequence[str], options: dict[str, Any]) -> None:
    install(uuids, **options)


def channel_to(worker: str) -> str:
    """Returns how tensors on devices travel to a worker now."""
    return rpc.debug_info()["cuda"]["channels"].get(worker, "")
