"""The CUDA devices of this process, by torch and the CUDA driver.

Copies for the channels run on streams of their own, one for each device, so that what functions queue on the
default stream later does not wait for them. A shared segment has an event that both processes know: the sender
records it after each copy into the segment, and the receiver's copy out of it waits for the event on the device.

Memory is shared between processes by functions of the driver, which torch has no public names for.
`torch.UntypedStorage._share_cuda_` shares memory too, but not as this channel needs it. It counts the users of
each tensor in a file of shared memory, so that what a killed receiver had is never freed; it shares whole blocks
of torch's allocator, with whatever else is in them; and with expandable segments the receiver has to take
descriptors out of the sender's process, which containers forbid. So the channel allocates memory of its own by
`cuMemAlloc`, and shares that. The driver's library is there wherever CUDA works, and its functions keep their
signatures.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from ...contracts.devices import StartedCopy
from .runtime import DeviceError, ExportedMemory, MappedMemory

__all__ = ["HANDLE_BYTES", "CudaDriver", "TorchDevices"]

HANDLE_BYTES = 64
"""Bytes of the handle of an allocation (CU_IPC_HANDLE_SIZE)."""

LIBRARY = "libcuda.so.1"

ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU is mapped if the two can reach each other."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_POINTER = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemAlloc_v2": (ctypes.POINTER(_POINTER), ctypes.c_size_t),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_POINTER), ctypes.POINTER(ctypes.c_size_t), _POINTER),
    "cuIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), _POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_POINTER), _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


@final
class CudaDriver:
    """Allocates, shares and maps memory of devices, which are given by the index that they have in this process.

    CUDA must be initialized. All methods raise DeviceError. Addresses are those of the device.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """Loads the library. Raises DeviceError if it is not there, as on machines without NVIDIA's driver."""
        try:
            library = load(LIBRARY)
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise DeviceError(f"{LIBRARY} cannot be used: {error}") from None
        self._library = library
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        """By device: the context that torch uses as well. It is kept as long as the process, as torch does."""

    def allocate(self, device: int, nbytes: int) -> tuple[int, bytes]:
        """Allocates memory; returns its address and the handle with which another process maps it."""
        address, handle = _POINTER(), _IpcHandle()
        with self._current(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except DeviceError:
                self._call("cuMemFree_v2", address)
                raise
        return address.value, bytes(handle)

    def free(self, device: int, address: int) -> None:
        """Frees memory that `allocate` has returned."""
        with self._current(device):
            self._call("cuMemFree_v2", address)

    def open(self, device: int, handle: bytes) -> tuple[int, int | None]:
        """Maps memory that another process has allocated, for a device that need not be the same one.

        Returns:
            Its address, and its size in bytes if the driver tells it.
        """
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"a handle of {len(handle)} bytes")
        address, base, size = _POINTER(), _POINTER(), ctypes.c_size_t()
        with self._current(device):
            opened = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ENABLE_PEER_ACCESS)
            try:
                self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            except DeviceError:
                return address.value, None
        return address.value, base.value + size.value - address.value

    def close(self, device: int, address: int) -> None:
        """Unmaps memory that `open` has returned."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    @contextlib.contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Makes the context of a device that of this thread."""
        context = self._context(device)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> int:
        with self._lock:
            if device not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(text))
            error = text.value.decode() if text.value else f"error {result}"
            raise DeviceError(f"{name} failed with {error}")


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
