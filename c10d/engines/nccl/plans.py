"""Plans: how each operation is carried out by calls of NCCL.

A plan is a generator that runs with the engine's stream as the current stream, so torch enqueues there what the
plan computes. It yields lists of NCCL calls. The runner makes them between ncclGroupStart and ncclGroupEnd,
together with those for the other GPUs of this process, and those of operations that were started with this one.

NcclCapability says which dtypes and reductions NCCL supports, and their numbers there: those of `ncclDataType_t`
and `ncclRedOp_t` in nccl.h, which are stable. Tensors that NCCL cannot reduce are gathered by NCCL and combined by
torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from ..base import chunks
from ..reductions import Reduction, combine_all, prepare, prepared
from .library import Communicator, Stream

__all__ = [
    "BYTES",
    "GpuRank",
    "NativeReduction",
    "NcclCall",
    "NcclCapability",
    "Plan",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
]

NcclCall = Callable[[Communicator, int], None]
"""A call of NCCL, given the communicator and the cudaStream_t."""

Plan = Iterator[list[NcclCall]]

BYTES: Final = 1
"""ncclUint8, the datatype of operations that only move data."""

_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}

_FLOAT8 = {torch.float8_e4m3fn: 10, torch.float8_e5m2: 11}

_REAL_DTYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)

_OPERATIONS = {"sum": _SUM, "premul_sum": _SUM, "product": _PRODUCT, "max": _MAX, "min": _MIN, "avg": _AVG}

_BOOL_OPERATIONS = {"sum": _MAX, "max": _MAX, "bor": _MAX, "product": _MIN, "min": _MIN, "band": _MIN}
"""For bools, which are reduced as bytes that are 0 or 1."""


@final
@dataclass(frozen=True, slots=True)
class NativeReduction:
    """A reduction as NCCL computes it.

    datatype: NCCL's number of the dtype.
    operation: NCCL's number of the reduction.
    width: how many numbers make an element, 2 for complex dtypes.
    """

    datatype: int
    operation: int
    width: int = 1


@final
@dataclass(frozen=True, slots=True)
class NcclCapability:
    """The version of NCCL and the GPU, which decide what NCCL can reduce.

    version: of NCCL, such as 22703 for 2.27.3.
    compute_capability: of the GPU, such as `(9, 0)`.
    """

    version: int
    compute_capability: tuple[int, int]

    def native(self, dtype: torch.dtype, reduction: Reduction) -> NativeReduction | None:
        """Returns how NCCL computes a reduction of a dtype; None if it cannot.

        The factor of a premultiplied sum must have been applied before.
        """
        name = reduction.name
        if dtype == torch.bool:
            return NativeReduction(BYTES, _BOOL_OPERATIONS[name]) if name in _BOOL_OPERATIONS else None
        if name not in _OPERATIONS:
            return None
        if dtype in _REAL_DTYPES:
            sums = name in {"sum", "premul_sum", "avg"}
            return NativeReduction(_DTYPES[_REAL_DTYPES[dtype]], _OPERATIONS[name], 2) if sums else None
        if dtype in _FLOAT8:
            # NCCL has these since 2.24, for Hopper and later. For averages it would divide before it sums, with
            # three bits of precision.
            is_supported = self.version >= 22400 and self.compute_capability >= (9, 0) and name != "avg"
            return NativeReduction(_FLOAT8[dtype], _OPERATIONS[name]) if is_supported else None
        return NativeReduction(_DTYPES[dtype], _OPERATIONS[name]) if dtype in _DTYPES else None


@final
@dataclass(frozen=True, slots=True)
class GpuRank:
    """A rank of a communicator, with a GPU of this process.

    rank, size: in the communicator, which has one rank for each GPU.
    gpu: index of the GPU.
    device: of the GPU.
    communicator: NCCL's handle.
    stream: that the engine's work on the GPU is enqueued on.
    capability: what NCCL can reduce on the GPU.
    """

    rank: int
    size: int
    gpu: int
    device: torch.device
    communicator: Communicator
    stream: Stream
    capability: NcclCapability


def broadcast(_: GpuRank, tensor: Tensor, root: int) -> Plan:
    """Broadcasts by NCCL."""
    yield _broadcast(tensor, tensor, root)


def all_reduce(me: GpuRank, tensor: Tensor, reduction: Reduction) -> Plan:
    """Reduces in place by NCCL; if it cannot, gathers and combines on every rank, in the order of ranks."""
    prepare(reduction, tensor)
    native = me.capability.native(tensor.dtype, reduction)
    if native is not None:
        yield _all_reduce(tensor, native)
        return
    parts = tensor.new_empty(me.size, tensor.numel())
    yield _all_gather(parts, tensor)
    combine_all(reduction, list(parts), tensor.view(-1))


def reduce(me: GpuRank, tensor: Tensor, root: int, reduction: Reduction) -> Plan:
    """Reduces in place by NCCL; if it cannot, gathers and combines on the root."""
    prepare(reduction, tensor)
    native = me.capability.native(tensor.dtype, reduction)
    if native is not None:
        yield _reduce(tensor, tensor, root, native)
        return
    parts = list(tensor.new_empty(me.size, tensor.numel())) if me.rank == root else []
    yield from gather(me, parts, tensor, root)
    if parts:
        combine_all(reduction, parts, tensor.view(-1))


def all_gather(me: GpuRank, outputs: Sequence[Tensor], tensor: Tensor) -> Plan:
    """Gathers tensors of one size through one buffer, and others by one broadcast per rank."""
    if all(output.numel() == tensor.numel() for output in outputs):
        parts = tensor.new_empty(me.size, tensor.numel())
        yield _all_gather(parts, tensor)
        for output, part in zip(outputs, parts, strict=True):
            output.view(-1).copy_(part)
        return
    yield [
        call
        for root, output in enumerate(outputs)
        for call in _broadcast(tensor if root == me.rank else output, output, root)
    ]


def all_gather_single(_: GpuRank, output: Tensor, tensor: Tensor) -> Plan:
    """Gathers by NCCL."""
    yield _all_gather(output, tensor)


def gather(me: GpuRank, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Plan:
    """Sends to the root, which copies its own tensor."""
    if me.rank != root:
        yield _send(tensor, root)
        return
    outputs[root].view(-1).copy_(tensor.view(-1))
    yield [call for peer, output in enumerate(outputs) if peer != root for call in _recv(output, peer)]


def scatter(me: GpuRank, tensor: Tensor, inputs: Sequence[Tensor], root: int) -> Plan:
    """Sends from the root, which copies its own tensor."""
    if me.rank != root:
        yield _recv(tensor, root)
        return
    tensor.view(-1).copy_(inputs[root].view(-1))
    yield [call for peer, part in enumerate(inputs) if peer != root for call in _send(part, peer)]


def reduce_scatter(me: GpuRank, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduces tensors of one size through one buffer, and others by one reduction per rank."""
    native = me.capability.native(tensor.dtype, reduction)
    if native is None:
        yield from _exchange_and_combine(me, tensor, inputs, reduction)
    elif all(part.numel() == tensor.numel() for part in inputs):
        whole = tensor.new_empty(me.size, tensor.numel())
        for row, part in zip(whole, inputs, strict=True):
            row.copy_(part.view(-1))
        prepare(reduction, whole)
        yield _reduce_scatter(tensor, whole, native)
    else:
        ready = [prepared(reduction, part) for part in inputs]
        yield [call for root, part in enumerate(ready) for call in _reduce(part, tensor, root, native)]


def reduce_scatter_single(me: GpuRank, tensor: Tensor, whole: Tensor, reduction: Reduction) -> Plan:
    """Reduces by NCCL; if it cannot, exchanges the chunks and combines them on each rank."""
    native = me.capability.native(tensor.dtype, reduction)
    if native is None:
        yield from _exchange_and_combine(me, tensor, chunks(whole, me.size), reduction)
    else:
        whole = prepared(reduction, whole)
        yield _reduce_scatter(tensor, whole, native)


def all_to_all(me: GpuRank, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Plan:
    """Sends and receives between all ranks; each copies its own part."""
    outputs[me.rank].view(-1).copy_(inputs[me.rank].view(-1))
    others = [rank for rank in range(me.size) if rank != me.rank]
    sends = [call for peer in others for call in _send(inputs[peer], peer)]
    yield sends + [call for peer in others for call in _recv(outputs[peer], peer)]


def barrier(me: GpuRank) -> Plan:
    """Reduces one number. The barrier is passed when the stream is done."""
    yield from all_reduce(me, torch.zeros(1, device=me.device), Reduction("sum"))


def send(_: GpuRank, tensor: Tensor) -> Plan:
    """Sends to rank 1 of a communicator of two ranks; empty tensors are not sent."""
    yield _send(tensor, 1)


def recv(_: GpuRank, tensor: Tensor) -> Plan:
    """Receives from rank 0 of a communicator of two ranks; empty tensors are not received."""
    yield _recv(tensor, 0)


def _exchange_and_combine(me: GpuRank, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Exchanges the inputs of a reduce_scatter by all_to_all and combines them on each rank."""
    parts = list(tensor.new_empty(me.size, tensor.numel()))
    yield from all_to_all(me, parts, [prepared(reduction, part) for part in inputs])
    combine_all(reduction, parts, tensor.view(-1))


# Calls of NCCL, none for empty tensors. They take pointers; the plan or the operation keeps the tensors alive.


def _bytes(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.itemsize


def _broadcast(source: Tensor, target: Tensor, root: int) -> list[NcclCall]:
    pointer, count = _bytes(source)
    to = target.data_ptr()
    return [lambda c, s: c.broadcast(pointer, to, count, BYTES, root, s)] if count else []


def _all_gather(whole: Tensor, part: Tensor) -> list[NcclCall]:
    pointer, count = _bytes(part)
    to = whole.data_ptr()
    return [lambda c, s: c.allGather(pointer, to, count, BYTES, s)] if count else []


def _all_reduce(tensor: Tensor, native: NativeReduction) -> list[NcclCall]:
    pointer, count = tensor.data_ptr(), tensor.numel() * native.width
    datatype, operation = native.datatype, native.operation
    return [lambda c, s: c.allReduce(pointer, pointer, count, datatype, operation, s)] if count else []


def _reduce(source: Tensor, target: Tensor, root: int, native: NativeReduction) -> list[NcclCall]:
    pointer, to, count = source.data_ptr(), target.data_ptr(), source.numel() * native.width
    datatype, operation = native.datatype, native.operation
    return [lambda c, s: c.reduce(pointer, to, count, datatype, operation, root, s)] if count else []


def _reduce_scatter(part: Tensor, whole: Tensor, native: NativeReduction) -> list[NcclCall]:
    pointer, to, count = whole.data_ptr(), part.data_ptr(), part.numel() * native.width
    datatype, operation = native.datatype, native.operation
    return [lambda c, s: c.reduceScatter(pointer, to, count, datatype, operation, s)] if count else []


def _send(tensor: Tensor, peer: int) -> list[NcclCall]:
    pointer, count = _bytes(tensor)
    return [lambda c, s: c.send(pointer, count, BYTES, peer, s)] if count else []


def _recv(tensor: Tensor, peer: int) -> list[NcclCall]:
    pointer, count = _bytes(tensor)
    return [lambda c, s: c.recv(pointer, count, BYTES, peer, s)] if count else []
