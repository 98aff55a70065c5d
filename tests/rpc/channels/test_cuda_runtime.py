"""What the runtime has streams, events and the driver do: they are replaced by some that record it."""

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gradwire.rpc.channels.cuda.runtime import DeviceError
from gradwire.rpc.channels.cuda.torch_runtime import HANDLE_BYTES, TorchDevices

GPU = torch.device("cuda", 0)
HANDLE = bytes(range(HANDLE_BYTES))


class Record:
    """torch.cuda of a machine with two GPUs, on whose devices memory is that of the host."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.memory = (ctypes.c_char * 4096)()
        self.address = ctypes.addressof(self.memory)
        self.events = 0
        self.is_busy = False
        record = self

        class Event:
            def __init__(self, **options: bool) -> None:
                record.events += 1
                self.name = f"event{record.events}"
                record.log.append(f"{self.name} {' '.join(options)}")

            @classmethod
            def from_ipc_handle(cls, device: torch.device, handle: bytes) -> "Event":
                assert (device, handle) == (GPU, b"event handle")
                return cls(imported=True)

            def ipc_handle(self) -> bytes:
                return b"event handle"

            def record(self, stream: "Stream") -> None:
                record.log.append(f"{stream.name} records {self.name}")

            def query(self) -> bool:
                return not record.is_busy

            def synchronize(self) -> None:
                record.log.append(f"{self.name} is waited for")

        class Stream:
            def __init__(self, device: torch.device, name: str = "side") -> None:
                self.name = name

            def query(self) -> bool:
                return self.name == "current" and not record.is_busy

            def wait_event(self, event: Event) -> None:
                record.log.append(f"{self.name} waits for {event.name}")

            def wait_stream(self, stream: "Stream") -> None:
                record.log.append(f"{self.name} waits for {stream.name}")

        @contextlib.contextmanager
        def use(stream: Stream):
            record.log.append(f"on {stream.name}")
            yield
            record.log.append(f"off {stream.name}")

        self.cuda = {
            "Event": Event,
            "Stream": Stream,
            "stream": use,
            "init": lambda: None,
            "device": lambda _device: contextlib.nullcontext(),
            "current_stream": lambda _device: Stream(GPU, "current"),
            "device_count": lambda: 2,
            "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid {device.index}"),
        }

    # The driver.

    def allocate(self, device: int, nbytes: int) -> tuple[int, bytes]:
        self.log.append(f"allocate {nbytes} on {device}")
        return self.address, HANDLE

    def free(self, device: int, address: int) -> None:
        assert address == self.address
        self.log.append(f"free on {device}")

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        assert handle == HANDLE
        self.log.append(f"open on {device}")
        return self.address, len(self.memory)

    def close(self, device: int, address: int) -> None:
        assert address == self.address
        self.log.append(f"close on {device}")

    def as_tensor(self, array: Any, device: torch.device) -> torch.Tensor:
        described = array.__cuda_array_interface__
        assert described["data"] == (self.address, False)
        assert (described["typestr"], device) == ("|u1", GPU)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=described["shape"][0])


@pytest.fixture
def record():
    made = Record()
    with patch.multiple(torch.cuda, **made.cuda), patch.object(torch, "as_tensor", made.as_tensor):
        yield made


def runtime(record: Record) -> TorchDevices:
    devices = TorchDevices()
    devices._driver = record
    return devices


def test_memory_is_filled_on_the_current_stream_and_freed_after_that(record):
    exported = runtime(record).export(GPU, 100)
    assert exported.handle == HANDLE + b"event handle"
    assert record.log == ["allocate 100 on 0", "event1 interprocess"]
    record.log.clear()
    exported.fill([(0, torch.arange(3, dtype=torch.uint8)), (8, torch.ones(2, dtype=torch.uint8))])
    assert record.memory[:11] == bytes([0, 1, 2, 0, 0, 0, 0, 0, 1, 1, 0])
    assert record.log == ["current waits for event1", "current records event1"]
    record.log.clear()
    exported.free()
    exported.free()
    assert record.log == ["event1 is waited for", "free on 0"]


def test_mapped_memory_is_read_on_a_stream_of_its_own_when_it_is_filled(record):
    record.memory[7:10] = b"abc"
    mapped = runtime(record).open(GPU, HANDLE + b"event handle", 100)
    assert record.log == ["open on 0", "event1 imported"]
    record.log.clear()
    target = torch.zeros(3, dtype=torch.uint8)
    with patch.object(torch.Tensor, "device", GPU):
        copy = mapped.copy_to(target, 7)
    assert bytes(target.tolist()) == b"abc"
    assert record.log == [
        "side waits for current",
        "side waits for event1",
        "on side",
        "event2 blocking",
        "side records event2",
        "off side",
    ]
    record.log.clear()
    record.is_busy = True
    assert not copy.is_complete()
    record.is_busy = False
    assert copy.is_complete()
    copy.wait()
    mapped.close()
    mapped.close()
    assert record.log == ["event2 is waited for", "close on 0"]


def test_memory_that_cannot_be_used_is_given_up(record):
    devices = runtime(record)
    with pytest.raises(DeviceError, match="a segment of 5000 bytes has 4096"):
        devices.open(GPU, HANDLE + b"event handle", 5000)
    assert record.log == ["open on 0", "close on 0"]
    record.log.clear()
    copied = torch.zeros(100, dtype=torch.uint8)  # as torch does if it takes memory for that of another device
    with patch.object(torch, "as_tensor", lambda _array, device: copied):
        with pytest.raises(DeviceError, match="cuda:0 can read is not its own"):
            devices.open(GPU, HANDLE + b"event handle", 100)
        with pytest.raises(DeviceError, match="cuda:0 cannot share memory"):
            devices.export(GPU, 100)
    assert [line for line in record.log if "event" not in line] == [
        "open on 0",
        "close on 0",
        "allocate 100 on 0",
        "free on 0",
    ]


def test_a_device_is_idle_if_its_current_stream_is(record):
    devices = runtime(record)
    assert devices.is_idle(GPU)
    record.is_busy = True
    assert not devices.is_idle(GPU)


def test_devices_are_found_by_their_uuid(record):
    devices = runtime(record)
    assert devices.uuid(GPU) == "uuid 0"
    assert devices.find("uuid 1") == torch.device("cuda", 1)
    assert devices.find("uuid 7") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_machine_without_cuda_has_an_error_that_says_so():
    with pytest.raises(DeviceError, match="CUDA cannot be used"):
        TorchDevices()
