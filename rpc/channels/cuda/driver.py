"""The functions of the CUDA driver that share memory between processes, which torch has no public names for.

`torch.UntypedStorage._share_cuda_` shares memory too, but not as this channel needs it. It counts the users of
each tensor in a file of shared memory, so that what a killed receiver had is never freed; it shares whole blocks
of torch's allocator, with whatever else is in them; and with expandable segments the receiver has to take
descriptors out of the sender's process, which containers forbid. So the channel allocates memory of its own by
`cuMemAlloc`, and shares that. The library is the driver's: it is there wherever CUDA works, and its functions
keep their signatures.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from .runtime import DeviceError

__all__ = ["HANDLE_BYTES", "CudaDriver"]

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
