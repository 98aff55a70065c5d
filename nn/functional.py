"""Collectives with gradients: the names of `torch.distributed.nn.functional`.

They run on the process groups of torch.distributed (`torch.distributed.init_process_group`), change none of their
inputs, and return new tensors. A backward pass runs collectives too, so all processes of a group must do it
alike: on each, the inputs require grad or on none, and the losses depend on the results of the same calls.

`group` is a process group, by default the one of all processes. `src` and `dst` are ranks among all processes.
Every function raises ValueError on a process that is not in the group, and what torch.distributed raises.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, ReduceOp

from .collectives import AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

DIFFERENTIABLE = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """The tensor of process `src`, on all of them.

    Args:
        tensor: what to send; on the others a tensor of the same shape and dtype.
        src: the sender.
        group: the processes.

    Returns:
        A new tensor. The sender's input gets the sum of all processes' gradients, that of the others zeros.
    """
    _size(group)
    result: torch.Tensor = Broadcast.run(src, group, tensor)
    return result


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None
) -> torch.Tensor:
    """The reduction of all tensors, on process `dst`.

    Args:
        tensor: of one shape and dtype on all processes.
        dst: who gets the result.
        op: see `all_reduce`.
        group: the processes.

    Returns:
        A new tensor; zeros on the others, whose gradient does not count.

    Raises:
        ValueError: the operation has no gradient, and the tensor is no integer one.
    """
    _size(group)
    _check_op(op, tensor)
    result: torch.Tensor = Reduce.run(dst, op, group, tensor)
    return result


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None) -> torch.Tensor:
    """The reduction of all tensors, on all processes.

    Args:
        tensor: of one shape and dtype on all processes.
        op: SUM, AVG, PRODUCT, MIN or MAX of `torch.distributed.ReduceOp`; for integers also its others. Equal
            least (greatest) elements share the gradient. A backward pass through PRODUCT gathers all tensors.
        group: the processes.

    Returns:
        A new tensor. Every input gets its gradient of the sum of all processes' losses.

    Raises:
        ValueError: the operation has no gradient, and the tensor is no integer one.
    """
    _size(group)
    _check_op(op, tensor)
    result: torch.Tensor = AllReduce.run(op, group, tensor)
    return result


def gather(tensor: torch.Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """All tensors, on process `dst`.

    Args:
        tensor: of one shape and dtype on all processes.
        dst: who gets them.
        group: the processes.

    Returns:
        One tensor of each process; zeros on the others, whose gradients do not count.
    """
    _size(group)
    result: tuple[torch.Tensor, ...] = Gather.run(dst, group, tensor)
    return result


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: ProcessGroup | None = None) -> torch.Tensor:
    """One of the tensors of process `src`, on each.

    Args:
        tensors: one for each process, all of one shape and dtype; on the others as many of this kind.
        src: the sender.
        group: the processes.

    Returns:
        A new tensor. The sender's inputs get their gradients, those of the others zeros.

    Raises:
        ValueError: there are too few or too many tensors, or they differ in shape or dtype.
    """
    _check_list("tensors", tensors, _size(group), alike=True)
    result: torch.Tensor = Scatter.run(src, group, *tensors)
    return result


def all_gather(tensor: torch.Tensor, group: ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """All tensors, on all processes.

    Args:
        tensor: of one shape and dtype on all processes.
        group: the processes.

    Returns:
        One tensor of each process.
    """
    _size(group)
    result: tuple[torch.Tensor, ...] = AllGather.run(group, None, tensor)
    return result


def _all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup | None = None
) -> torch.Tensor:
    """All tensors, on all processes, as one.

    Args:
        output_tensor: is filled: contiguous, with as many elements as all inputs together.
        input_tensor: of one shape and dtype on all processes.
        group: the processes.

    Returns:
        A tensor over the memory of `output_tensor`, that gradients flow through.
    """
    _size(group)
    result: torch.Tensor = AllGather.run(group, _buffer("output_tensor", output_tensor), input_tensor)
    return result


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Of the reductions of all processes' first tensors, second tensors and so on, one on each.

    Args:
        output: is filled: contiguous, of the shape and dtype of an input.
        input_list: a tensor for each process, all of one shape and dtype.
        op: see `all_reduce`.
        group: the processes.

    Returns:
        A tensor over the memory of `output`, that gradients flow through.

    Raises:
        ValueError: there are too few or too many tensors, they differ, or the operation has no gradient.
    """
    _check_list("input_list", input_list, _size(group), alike=True)
    _check_op(op, output)
    result: torch.Tensor = ReduceScatter.run(op, group, _buffer("output", output), *input_list)
    return result


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """From each process a tensor to each.

    Args:
        output_tensor_list: are filled; each of the shape of what its process sends, all of one dtype.
        input_tensor_list: a tensor for each process. They may differ in shape.
        group: the processes.

    Returns:
        A tensor of each process.

    Raises:
        ValueError: there are too few or too many tensors.
    """
    size = _size(group)
    _check_list("output_tensor_list", output_tensor_list, size)
    _check_list("input_tensor_list", input_tensor_list, size)
    receive, send = ([tensor.numel() for tensor in each] for each in (output_tensor_list, input_tensor_list))
    sent = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
    flat: torch.Tensor = AllToAll.run(group, receive, send, sent.new_empty(sum(receive)), sent)
    parts = torch.split(flat, receive)
    results = tuple(part.view(output.shape) for part, output in zip(parts, output_tensor_list, strict=True))
    for output, result in zip(output_tensor_list, results, strict=True):
        output.detach().copy_(result.detach())
    return results


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the name in torch
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """From each process a part of a tensor to each; what comes is one tensor too.

    Args:
        output: is filled: contiguous.
        input: what to send.
        output_split_sizes: how many rows come from each process; by default equally many.
        input_split_sizes: how many rows go to each process; by default equally many.
        group: the processes.

    Returns:
        A tensor over the memory of `output`, that gradients flow through.

    Raises:
        ValueError: rows and split sizes do not agree.
    """
    size = _size(group)
    receive = _splits("output", output, output_split_sizes, size)
    send = _splits("input", input, input_split_sizes, size)
    result: torch.Tensor = AllToAll.run(group, receive, send, _buffer("output", output), input)
    return result


def _size(group: ProcessGroup | None) -> int:
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(f"process {dist.get_rank()} is not in the group {group}: only its members may call")
    return size


def _buffer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to fill in place of `tensor`; a graph that has saved the former content gets to know."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous: give one that is, or a new one"
        )
    increment_version(tensor)
    return tensor.detach()


def _check_op(op: Any, tensor: torch.Tensor) -> None:
    # Whether the tensor requires grad does not matter: all processes must come to the same answer.
    if op not in DIFFERENTIABLE and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"op is {op}, which has no gradient: use SUM, AVG, PRODUCT, MIN or MAX, or the functions of "
            "torch.distributed itself"
        )


def _check_list(name: str, tensors: Sequence[torch.Tensor], size: int, *, alike: bool = False) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name} has {len(tensors)} tensors: give one for each of the group's {size} processes")
    for index, (a, b) in enumerate(pairwise(tensors)):
        if a.dtype != b.dtype or (alike and a.shape != b.shape):
            raise ValueError(
                f"{name}[{index}] is a {a.dtype} of shape {tuple(a.shape)}, but {name}[{index + 1}] a {b.dtype} "
                f"of shape {tuple(b.shape)}: give tensors of one kind"
            )


def _splits(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, size: int) -> list[int]:
    rows = len(tensor)
    if not sizes:
        if rows % size:
            raise ValueError(
                f"{name} has {rows} rows, which {size} processes cannot share: give {name}_split_sizes"
            )
        return [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise ValueError(f"{name}_split_sizes is {list(sizes)}: give {size} numbers whose sum is {rows}")
    return list(sizes)
