"""Fakes of NCCL and CUDA for machines without a GPU.

`StoreNccl` records the calls of NCCL, and carries them out through a store on CPU memory that it gets by pointer.
`CpuGpus` has streams that run everything immediately and record their commands; their events are complete unless a
test stalls the stream.
"""

import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gradwire.c10d import Store, register_engine
from gradwire.c10d.engines import Setup
from gradwire.c10d.engines.nccl import NcclEngine
from gradwire.c10d.stores.views import PrefixStore
from torch import Tensor

DTYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    3: torch.uint32,
    4: torch.int64,
    5: torch.uint64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
    10: torch.float8_e4m3fn,
    11: torch.float8_e5m2,
}
"""The datatypes of nccl.h."""


def memory(pointer: int, count: int, datatype: int) -> Tensor:
    """Returns a tensor over the memory at an address."""
    dtype = DTYPES[datatype]
    if not count:
        return torch.empty(0, dtype=dtype)
    data = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(data, dtype=dtype)


def plain(tensor: Tensor) -> Tensor:
    """Returns the same numbers in a dtype that torch computes with."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def reduction(tensors: list[Tensor], op: int) -> Tensor:
    whole = torch.stack([plain(tensor) for tensor in tensors])
    if op == 4:
        total = whole.sum(0)
        exact = whole.is_floating_point()
        return total / len(tensors) if exact else total.div(len(tensors), rounding_mode="trunc")
    return [whole.sum(0), whole.prod(0), whole.amax(0), whole.amin(0)][op]


class StoreNccl:
    """Every call posts this rank's data in the store, and then takes the other ranks', at the end of the group."""

    def __init__(self, store: Store, version: int = 22703) -> None:
        self.store = store
        self.version = version
        self.calls: list[tuple[Any, ...]] = []
        self.communicators: list[StoreCommunicator] = []
        self.local = threading.local()

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> bytes:
        return random.randbytes(128)

    def groupStart(self) -> None:
        self.calls.append(("groupStart",))
        self.local.collected = []

    def groupEnd(self) -> None:
        self.calls.append(("groupEnd",))
        collected, self.local.collected = self.local.collected, None
        for post, _ in collected:
            post()
        for _, take in collected:
            take()

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int) -> "StoreCommunicator":
        assert type(commId) is bytes
        assert len(commId) == 128
        self.calls.append(("NcclCommunicator", ndev, rank))
        self.communicators.append(StoreCommunicator(self, ndev, commId, rank))
        return self.communicators[-1]

    def add(self, call: tuple[Any, ...], post: Callable[[], None], take: Callable[[], None]) -> None:
        self.calls.append(call)
        if getattr(self.local, "collected", None) is not None:
            self.local.collected.append((post, take))
        else:
            post()
            take()


class StoreCommunicator:
    def __init__(self, library: StoreNccl, size: int, unique_id: bytes, rank: int) -> None:
        self.library = library
        self.size = size
        self.rank = rank
        self.store = PrefixStore(unique_id.hex(), library.store)
        self.collectives = itertools.count()
        self.messages: dict[tuple[int, int], int] = {}
        self.error: Exception | None = None
        self.released_by: list[str] = []
        self.pause = threading.Event()

    def run_collective(
        self, call: tuple[Any, ...], given: Tensor | None, take: Callable[[list[Tensor]], None], datatype: int
    ) -> None:
        """Runs a collective in which every rank gives a tensor, or none, and `take` gets those of all ranks."""
        number = next(self.collectives)

        def post() -> None:
            data = b"" if given is None else given.view(torch.uint8).numpy().tobytes()
            self.store.set(f"{number}/{self.rank}", data)

        def take_all() -> None:
            all_data = [self.take(f"{number}/{rank}") for rank in range(self.size)]
            empty = torch.empty(0, dtype=DTYPES[datatype])
            take([torch.frombuffer(bytearray(d), dtype=DTYPES[datatype]) if d else empty for d in all_data])

        self.library.add(call, post, take_all)

    def allReduce(self, source: int, target: int, count: int, datatype: int, op: int, stream: int) -> None:
        self.run_collective(
            ("allReduce", self.rank, count, datatype, op, stream),
            memory(source, count, datatype),
            lambda tensors: memory(target, count, datatype).copy_(reduction(tensors, op)),
            datatype,
        )

    def reduce(self, source: int, target: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        def take(tensors: list[Tensor]) -> None:
            if self.rank == root:
                memory(target, count, datatype).copy_(reduction(tensors, op))

        call = ("reduce", self.rank, count, datatype, op, root, stream)
        self.run_collective(call, memory(source, count, datatype), take, datatype)

    def broadcast(self, source: int, target: int, count: int, datatype: int, root: int, stream: int) -> None:
        given = memory(source, count, datatype) if self.rank == root else None
        self.run_collective(
            ("broadcast", self.rank, count, datatype, root, stream),
            given,
            lambda tensors: memory(target, count, datatype).copy_(tensors[root]),
            datatype,
        )

    def allGather(self, source: int, target: int, count: int, datatype: int, stream: int) -> None:
        self.run_collective(
            ("allGather", self.rank, count, datatype, stream),
            memory(source, count, datatype),
            lambda tensors: memory(target, count * self.size, datatype).copy_(torch.cat(tensors)),
            datatype,
        )

    def reduceScatter(self, source: int, target: int, count: int, datatype: int, op: int, stream: int) -> None:
        def take(tensors: list[Tensor]) -> None:
            mine = [tensor.view(self.size, -1)[self.rank] for tensor in tensors]
            memory(target, count, datatype).copy_(reduction(mine, op))

        call = ("reduceScatter", self.rank, count, datatype, op, stream)
        self.run_collective(call, memory(source, count * self.size, datatype), take, datatype)

    def send(self, source: int, count: int, datatype: int, peer: int, stream: int) -> None:
        key = self.message(self.rank, peer)
        data = memory(source, count, datatype)
        call = ("send", self.rank, count, datatype, peer, stream)
        self.library.add(call, lambda: self.store.set(key, data.view(torch.uint8).numpy().tobytes()), lambda: None)

    def recv(self, target: int, count: int, datatype: int, peer: int, stream: int) -> None:
        key = self.message(peer, self.rank)

        def take() -> None:
            data = torch.frombuffer(bytearray(self.take(key)), dtype=DTYPES[datatype])
            memory(target, count, datatype).copy_(data)

        self.library.add(("recv", self.rank, count, datatype, peer, stream), lambda: None, take)

    def take(self, key: str) -> bytes:
        """Waits for the data at a key. Polls, as a wait in torch's TCPStore blocks the store for other threads."""
        while not self.store.check([key]):
            if self.released_by:
                raise RuntimeError("the communicator was aborted")
            self.pause.wait(0.0005)
        return self.store.get(key)

    def message(self, source: int, target: int) -> str:
        number = self.messages[source, target] = self.messages.get((source, target), 0) + 1
        return f"{source}>{target}/{number}"

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.released_by.append("abort")

    def destroy(self) -> None:
        self.released_by.append("destroy")


class CpuEvent:
    def __init__(self, stream: "CpuStream") -> None:
        self.stream = stream

    def query(self) -> bool:
        return not self.stream.is_stalled


class CpuStream:
    """Records commands; its events are not complete while `is_stalled`."""

    def __init__(self, cuda_stream: int, commands: list[tuple[Any, ...]]) -> None:
        self.cuda_stream = cuda_stream
        self.commands = commands
        self.is_stalled = False

    def record_event(self) -> CpuEvent:
        event = CpuEvent(self)
        self.commands.append(("record", self.cuda_stream))
        return event

    def wait_event(self, event: CpuEvent) -> None:
        self.commands.append(("wait", self.cuda_stream, event.stream.cuda_stream))


class CpuGpus:
    """The GPUs of one process. CPU tensors are on GPU 0 unless `put` says otherwise."""

    def __init__(self, name: str, capability: tuple[int, int] = (9, 0)) -> None:
        self.name = name
        self.capability = capability
        self.commands: list[tuple[Any, ...]] = []
        self.streams: list[CpuStream] = []
        self.current_streams: dict[int, CpuStream] = {}
        self.numbers = itertools.count(1000)
        self.places: dict[int, int] = {}
        self.is_captured = False

    def put(self, tensor: Tensor, gpu: int) -> Tensor:
        self.places[tensor.data_ptr()] = gpu
        return tensor

    def index_of(self, tensor: Tensor) -> int:
        return self.places.get(tensor.data_ptr(), 0)

    def current(self) -> int:
        return 0

    def device(self, gpu: int) -> torch.device:
        return torch.device("cpu")

    def uuid(self, gpu: int) -> str:
        return f"{self.name}/{gpu}"

    def compute_capability(self, gpu: int) -> tuple[int, int]:
        return self.capability

    def new_stream(self, gpu: int) -> CpuStream:
        self.streams.append(CpuStream(next(self.numbers), self.commands))
        return self.streams[-1]

    def current_stream(self, gpu: int) -> CpuStream:
        return self.current_streams.setdefault(gpu, CpuStream(gpu, self.commands))

    @contextmanager
    def use(self, stream: CpuStream) -> Iterator[None]:
        self.commands.append(("on", stream.cuda_stream))
        yield
        self.commands.append(("off", stream.cuda_stream))

    def is_capturing(self) -> bool:
        return self.is_captured


def make_engine(setup: Setup) -> NcclEngine:
    """Creates an engine on these fakes, for groups of processes."""
    library = StoreNccl(PrefixStore("nccl", setup.store))
    return NcclEngine(setup, library=library, gpus=CpuGpus(f"process {setup.global_ranks[setup.rank]}"))


register_engine("fake_nccl", make_engine, devices=["cpu"])
