"""What each operation is in terms of NCCL's calls.

A plan is a generator that runs with the engine's stream as the current one. What it computes before and after its
`yield`s, torch puts on that stream; what it yields are calls of NCCL, which are made together, in one group with
those of the other GPUs of this process and of operations that were started together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ...reductions import Reduction, combine, finish, prepare
from ..base import chunks
from .dtypes import BYTES, Ability, Native
from .library import Communicator
from .streams import Stream

__all__ = [
    "CollectiveCall",
    "Plan",
    "PlanMember",
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

CollectiveCall = Callable[[Communicator, int], None]
"""A call of NCCL on a communicator and a stream."""

Plan = Iterator[list[CollectiveCall]]


@final
@dataclass(frozen=True, slots=True)
class PlanMember:
    """A rank of a communicator that is a GPU of this process.

    rank, size: in the communicator, which has one rank for each GPU.
    gpu: which of this process's.
    stream: where its work is done.
    """

    rank: int
    size: int
    gpu: int
    device: torch.device
    communicator: Communicator
    stream: Stream
    ability: Ability


def broadcast(_: PlanMember, tensor: Tensor, root: int) -> Plan:
    """Every rank's tensor becomes the root's."""
    yield _broadcast(tensor, tensor, root)


def all_reduce(member: PlanMember, tensor: Tensor, reduction: Reduction) -> Plan:
    """In place, by NCCL or else by torch on all ranks alike."""
    prepare(reduction, tensor)
    native = member.ability.native(tensor.dtype, reduction)
    if native is not None:
        yield _all_reduce(tensor, native)
        return
    parts = tensor.new_empty(member.size, tensor.numel())
    yield _all_gather(parts, tensor)
    _fold(reduction, list(parts), tensor)


def reduce(member: PlanMember, tensor: Tensor, root: int, reduction: Reduction) -> Plan:
    """In place on the root."""
    prepare(reduction, tensor)
    native = member.ability.native(tensor.dtype, reduction)
    if native is not None:
        yield _reduce(tensor, tensor, root, native)
        return
    parts = list(tensor.new_empty(member.size, tensor.numel())) if member.rank == root else []
    yield from gather(member, parts, tensor, root)
    if parts:
        _fold(reduction, parts, tensor)


def all_gather(member: PlanMember, outputs: Sequence[Tensor], tensor: Tensor) -> Plan:
    """Tensors of one size through one that holds them all; others as a broadcast of each rank."""
    if all(output.numel() == tensor.numel() for output in outputs):
        parts = tensor.new_empty(member.size, tensor.numel())
        yield _all_gather(parts, tensor)
        for output, part in zip(outputs, parts, strict=True):
            output.view(-1).copy_(part)
        return
    yield [
        call
        for root, output in enumerate(outputs)
        for call in _broadcast(tensor if root == member.rank else output, output, root)
    ]


def all_gather_single(_: PlanMember, output: Tensor, tensor: Tensor) -> Plan:
    """Straight into the output."""
    yield _all_gather(output, tensor)


def gather(member: PlanMember, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Plan:
    """Messages to the root; its own tensor is copied."""
    if member.rank != root:
        yield _send(tensor, root)
        return
    outputs[root].view(-1).copy_(tensor.view(-1))
    yield [call for peer, output in enumerate(outputs) if peer != root for call in _recv(output, peer)]


def scatter(member: PlanMember, tensor: Tensor, inputs: Sequence[Tensor], root: int) -> Plan:
    """Messages from the root; its own tensor is copied."""
    if member.rank != root:
        yield _recv(tensor, root)
        return
    tensor.view(-1).copy_(inputs[root].view(-1))
    yield [call for peer, part in enumerate(inputs) if peer != root for call in _send(part, peer)]


def reduce_scatter(member: PlanMember, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Tensors of one size from one that holds them all; others as a reduction for each rank."""
    native = member.ability.native(tensor.dtype, reduction)
    if native is None:
        yield from _exchange_and_fold(member, tensor, inputs, reduction)
    elif all(part.numel() == tensor.numel() for part in inputs):
        whole = tensor.new_empty(member.size, tensor.numel())
        for row, part in zip(whole, inputs, strict=True):
            row.copy_(part.view(-1))
        prepare(reduction, whole)
        yield _reduce_scatter(tensor, whole, native)
    else:
        prepared = [_prepared(reduction, part) for part in inputs]
        yield [call for root, part in enumerate(prepared) for call in _reduce(part, tensor, root, native)]


def reduce_scatter_single(member: PlanMember, tensor: Tensor, whole: Tensor, reduction: Reduction) -> Plan:
    """Straight from the input."""
    native = member.ability.native(tensor.dtype, reduction)
    if native is None:
        yield from _exchange_and_fold(member, tensor, chunks(whole, member.size), reduction)
    else:
        whole = _prepared(reduction, whole)
        yield _reduce_scatter(tensor, whole, native)


def all_to_all(member: PlanMember, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Plan:
    """Messages between every two ranks; each one's own part is copied."""
    outputs[member.rank].view(-1).copy_(inputs[member.rank].view(-1))
    others = [rank for rank in range(member.size) if rank != member.rank]
    sends = [call for peer in others for call in _send(inputs[peer], peer)]
    yield sends + [call for peer in others for call in _recv(outputs[peer], peer)]


def barrier(member: PlanMember) -> Plan:
    """A reduction of one number, for which somebody has to wait."""
    yield from all_reduce(member, torch.zeros(1, device=member.device), Reduction("sum"))


def send(_: PlanMember, tensor: Tensor) -> Plan:
    """One message to rank 1 of a communicator of two; for an empty tensor none, on either side."""
    yield _send(tensor, 1)


def recv(_: PlanMember, tensor: Tensor) -> Plan:
    """One message from rank 0 of a communicator of two."""
    yield _recv(tensor, 0)


def _exchange_and_fold(member: PlanMember, tensor: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Plan:
    """A reduce_scatter that torch computes, each rank its own part."""
    parts = list(tensor.new_empty(member.size, tensor.numel()))
    yield from all_to_all(member, parts, [_prepared(reduction, part) for part in inputs])
    _fold(reduction, parts, tensor)


def _fold(reduction: Reduction, parts: Sequence[Tensor], tensor: Tensor) -> None:
    """The tensor becomes the reduction of the parts, in their order."""
    flat = tensor.view(-1)
    flat.copy_(parts[0])
    for part in parts[1:]:
        combine(reduction, flat, part, flat)
    finish(reduction, flat, len(parts))


def _prepared(reduction: Reduction, tensor: Tensor) -> Tensor:
    """The tensor with the factor applied; the user's stays as it is."""
    if reduction.factor is None:
        return tensor
    tensor = tensor.clone()
    prepare(reduction, tensor)
    return tensor


# Calls of NCCL, none for tensors without elements. They take pointers: plan and operation keep the tensors.


def _bytes(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.itemsize


def _broadcast(source: Tensor, target: Tensor, root: int) -> list[CollectiveCall]:
    pointer, count = _bytes(source)
    to = target.data_ptr()
    return [lambda c, s: c.broadcast(pointer, to, count, BYTES, root, s)] if count else []


def _all_gather(whole: Tensor, part: Tensor) -> list[CollectiveCall]:
    pointer, count = _bytes(part)
    to = whole.data_ptr()
    return [lambda c, s: c.allGather(pointer, to, count, BYTES, s)] if count else []


def _all_reduce(tensor: Tensor, native: Native) -> list[CollectiveCall]:
    pointer, count = tensor.data_ptr(), tensor.numel() * native.width
    datatype, operation = native.datatype, native.operation
    return [lambda c, s: c.allReduce(pointer, pointer, count, datatype, operation, s)] if count else []


def _reduce(source: Tensor, target: Tensor, root: int, native: Native) -> list[CollectiveCall]:
    pointer, to, count = source.data_ptr(), target.data_ptr(), source.numel() * native.width
    datatype, operation = native.datatype, native.operation
    return [lambda c, s: c.reduce(pointer, to, count, datatype, operation, root, s)] if count else []


def _reduce_scatter(part: Tensor, whole: Tensor, native: Native) -> list[CollectiveCall]:
    pointer, to, count = whole.data_ptr(), part.data_ptr(), part.numel() * native.width
    datatype, operation = native.datatype, native.operation
    return [lambda c, s: c.reduceScatter(pointer, to, count, datatype, operation, s)] if count else []


def _send(tensor: Tensor, peer: int) -> list[CollectiveCall]:
    pointer, count = _bytes(tensor)
    return [lambda c, s: c.send(pointer, count, BYTES, peer, s)] if count else []


def _recv(tensor: Tensor, peer: int) -> list[CollectiveCall]:
    pointer, count = _bytes(tensor)
    return [lambda c, s: c.recv(pointer, count, BYTES, peer, s)] if count else []
