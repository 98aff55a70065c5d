"""The CUDA devices of this process, by torch and the CUDA driver.

Copies for the channels run on streams of their own, one for each device, so that what functions queue on the
default stream later does not wait for them. A shared segment has an event that both processes know: the sender
records it after each copy into the segment, and the receiver's copy out of it waits for the event on the device.
"""

import threading
from collections.abc import Sequence
from typing import Any, final

import torch

from ...contracts.devices import StartedCopy
from .driver import HANDLE_BYTES, CudaDriver
from .runtime import DeviceError, ExportedMemory, MappedMemory

__all__ = ["TorchDevices"]


class _DeviceArray:
    """Memory of a device that torch has not allocated, in the form that torch and others take."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns a tensor over memory that torch has not allocated. Raises DeviceError."""
    tensor = torch.as_tensor(_DeviceArray(address, nbytes), device=device)
    if tensor.data_ptr() != address:  # torch takes it for memory of another device, and has copied it
        raise DeviceError(f"memory that {device} can read is not its own")
    return tensor


@final
class _EventCopy:
    """A copy that is complete when an event is. Keeps what it reads."""

    def __init__(self, event: torch.cuda.Event, source: object) -> None:
        self._event = event
        self._source = source

    def is_complete(self) -> bool:
        """Looks at the event."""
        if not self._event.query():  # type: ignore[no-untyped-call]
            return False
        self._source = None
        return True

    def wait(self) -> None:
        """Waits for the event, without the interpreter's lock."""
        self._event.synchronize()
        self._source = None


@final
class _Exported:
    """Memory by `cuMemAlloc`, and an event that tells when it is filled."""

    def __init__(self, driver: CudaDriver, device: torch.device, nbytes: int) -> None:
        self._driver = driver
        self._device = device
        self._address, memory_handle = driver.allocate(device.index, nbytes)
        self._memory: torch.Tensor | None = None
        try:
            with torch.cuda.device(device):
                self._filled = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
                event_handle: bytes = self._filled.ipc_handle()  # type: ignore[no-untyped-call]
            self._memory = _tensor_at(self._address, nbytes, device)
        except RuntimeError as error:
            driver.free(device.index, self._address)
            raise DeviceError(f"{device} cannot share memory: {error}") from None
        self.handle = memory_handle + event_handle

    def fill(self, elements: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copies on the current stream, which the program has ordered, and records the event there."""
        assert self._memory is not None
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._filled)  # of a copy that nobody has waited for, on another stream
            for begin, each in elements:
                self._memory[begin : begin + each.numel()].copy_(each, non_blocking=True)
            self._filled.record(stream)

    def free(self) -> None:
        """Waits for the last copy, and frees the memory."""
        if self._memory is not None:
            self._memory = None
            self._filled.synchronize()
            self._driver.free(self._device.index, self._address)


@final
class _Mapped:
    """Memory and event of another process."""

    def __init__(self, runtime: "TorchDevices", device: torch.device, handle: bytes, nbytes: int) -> None:
        self._runtime = runtime
        self._device = device
        self._address, size = runtime.driver.open(device.index, handle[:HANDLE_BYTES])
        self._memory: torch.Tensor | None = None
        try:
            if size is not None and size < nbytes:
                raise DeviceError(f"a segment of {nbytes} bytes has {size}")
            self._filled = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
                device, handle[HANDLE_BYTES:]
            )
            self._memory = _tensor_at(self._address, nbytes, device)
        except RuntimeError as error:
            runtime.driver.close(device.index, self._address)
            raise DeviceError(str(error)) from None

    def copy_to(self, target: torch.Tensor, offset: int) -> StartedCopy:
        """Copies when the owner's event is complete."""
        assert self._memory is not None
        return self._runtime.start_copy(target, self._memory[offset : offset + target.numel()], self._filled)

    def close(self) -> None:
        """Closes the handle. The tensor over the memory goes first."""
        if self._memory is not None:
            self._memory = None
            self._runtime.driver.close(self._device.index, self._address)


@final
class TorchDevices:
    """A DeviceRuntime."""

    def __init__(self) -> None:
        """Initializes CUDA. Raises DeviceError if this machine, or this torch, has none."""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"CUDA cannot be used: {error}") from None
        self._lock = threading.Lock()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._driver: CudaDriver | None = None

    @property
    def driver(self) -> CudaDriver:
        """The driver. Raises DeviceError where there is none, as with ROCm."""
        with self._lock:
            if self._driver is None:
                self._driver = CudaDriver()
            return self._driver

    def uuid(self, device: torch.device) -> str:
        """Returns the UUID of the GPU, or of its part if it is divided (MIG)."""
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.uuid)

    def find(self, uuid: str) -> torch.device | None:
        """Returns the device with this UUID."""
        devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        return next((device for device in devices if self.uuid(device) == uuid), None)

    def is_idle(self, device: torch.device) -> bool:
        """Looks at the current stream."""
        return bool(torch.cuda.current_stream(device).query())

    def export(self, device: torch.device, nbytes: int) -> ExportedMemory:
        """Allocates memory of `cuMemAlloc`, which torch's allocator does not know."""
        return _Exported(self.driver, device, nbytes)

    def open(self, device: torch.device, handle: bytes, nbytes: int) -> MappedMemory:
        """Maps it."""
        return _Mapped(self, device, handle, nbytes)

    def empty(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Allocates by torch."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocates by torch, which keeps such memory for further use."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def start_copy(
        self, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None = None
    ) -> StartedCopy:
        """Copies on the stream for copies of the device that reads, or writes what the host has.

        The device waits for the event `after` first.
        """
        device = source.device if source.is_cuda else target.device
        stream = self._stream(device)
        # The allocator may have given out memory that the current stream still uses.
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            # A thread that waits for it sleeps.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        return _EventCopy(event, source)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device]
