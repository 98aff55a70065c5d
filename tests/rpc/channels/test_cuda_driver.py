"""The functions of the CUDA driver, called on a library that records the calls."""

import ctypes

import pytest
from gradwire.rpc.channels.cuda.runtime import DeviceError
from gradwire.rpc.channels.cuda.torch_runtime import HANDLE_BYTES, CudaDriver

HANDLE = bytes(range(HANDLE_BYTES))  # with a zero byte in front, which ends no string here


class FakeLibrary:
    """libcuda as ctypes gives it: functions with attributes, which write through pointers."""

    def __init__(self, failing: str = "", size: int = 4096) -> None:
        self.calls: list[str] = []
        self.failing = failing
        self.size = size

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments):
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
                return 0
            self.calls.append(name)
            if name == self.failing:
                return 2
            if name == "cuMemAlloc_v2":
                arguments[0]._obj.value = 1 << 40
            elif name == "cuIpcGetMemHandle":
                ctypes.memmove(ctypes.addressof(arguments[0]._obj), HANDLE, HANDLE_BYTES)
            elif name == "cuIpcOpenMemHandle_v2":
                assert bytes(arguments[1]) == HANDLE
                assert arguments[2] == 1
                arguments[0]._obj.value = 1 << 41
            elif name == "cuMemGetAddressRange_v2":
                arguments[0]._obj.value, arguments[1]._obj.value = 1 << 41, self.size
            elif name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 77
            elif name == "cuCtxPushCurrent_v2":
                assert arguments[0] == 77
            return 0

        self.__dict__[name] = function
        return function


def driver(library: FakeLibrary) -> CudaDriver:
    return CudaDriver(lambda name: library)


def test_memory_is_shared_in_the_context_of_its_device():
    library = FakeLibrary()
    cuda = driver(library)
    assert cuda.allocate(1, 4096) == (1 << 40, HANDLE)
    begin = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
    assert library.calls == [*begin, "cuMemAlloc_v2", "cuIpcGetMemHandle", "cuCtxPopCurrent_v2"]
    library.calls.clear()
    cuda.free(1, 1 << 40)
    assert library.calls == ["cuCtxPushCurrent_v2", "cuMemFree_v2", "cuCtxPopCurrent_v2"]


def test_mapped_memory_has_the_size_that_it_was_allocated_with():
    library = FakeLibrary(size=12345)
    cuda = driver(library)
    assert cuda.open(0, HANDLE) == (1 << 41, 12345)
    library.calls.clear()
    cuda.close(0, 1 << 41)
    assert library.calls == ["cuCtxPushCurrent_v2", "cuIpcCloseMemHandle", "cuCtxPopCurrent_v2"]


@pytest.mark.parametrize(
    ("failing", "undone"), [("cuIpcGetMemHandle", "cuMemFree_v2"), ("cuMemAlloc_v2", "cuCtxPopCurrent_v2")]
)
def test_an_allocation_that_fails_leaves_nothing(failing, undone):
    library = FakeLibrary(failing)
    with pytest.raises(DeviceError, match=f"{failing} failed with CUDA_ERROR_OUT_OF_MEMORY"):
        driver(library).allocate(0, 4096)
    assert undone in library.calls
    assert library.calls[-1] == "cuCtxPopCurrent_v2"


def test_a_mapping_that_fails_leaves_nothing():
    library = FakeLibrary("cuIpcOpenMemHandle_v2")
    with pytest.raises(DeviceError, match="cuIpcOpenMemHandle_v2 failed"):
        driver(library).open(0, HANDLE)
    assert library.calls[-1] == "cuCtxPopCurrent_v2"
    assert driver(FakeLibrary("cuMemGetAddressRange_v2")).open(0, HANDLE) == (1 << 41, None)
    with pytest.raises(DeviceError, match="a handle of 3 bytes"):
        driver(library).open(0, b"abc")


def test_a_machine_without_the_driver_has_an_error_that_says_so():
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 cannot be used"):
        CudaDriver(lambda name: ctypes.CDLL(f"{name}.missing"))
