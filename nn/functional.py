"""Differentiable collectives, with the names and arguments of `torch.distributed.nn.functional`.

They run on process groups of torch.distributed (`torch.distributed.init_process_group`) and leave their inputs
unchanged. What they return is differentiable. Those with output arguments write to these too; use the returned
tensors, not the output arguments, where gradients are to flow.

The backward pass of a collective is a collective as well, so all ranks of the group must run it: the inputs must
require grad either on every rank or on none, and the losses of all ranks must depend on the same calls.

Unless stated otherwise, tensors have the same shape and dtype on all ranks, and are of any shape. `group` defaults
to the default process group. `src` and `dst` are global ranks: ranks in the default group. Every function raises
ValueError on a rank that is not in the group, and whatever torch.distributed raises.
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

DIFFERENTIABLE_OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
"""The reductions that have a gradient. Backends refuse PRODUCT, MIN and MAX of complex tensors."""


def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None) -> torch.Tensor:
    """Returns the tensor of rank `src` on every rank.

    Args:
        tensor: the tensor to send; on the other ranks, one of the same shape, dtype and `requires_grad`, whose
            values are ignored.
        src: the global rank of the sender.
        group: the process group.

    Returns:
        A new tensor. In the backward pass, the input of `src` gets the sum of all ranks' gradients; the inputs of
        the other ranks get zeros.
    """
    _group_size(group)
    result: torch.Tensor = Broadcast.run(src, group, tensor)
    return result


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Reduces the tensors of all ranks to rank `dst`.

    Args:
        tensor: this rank's tensor.
        dst: the global rank that gets the result.
        op: the reduction; see `all_reduce`.
        group: the process group.

    Returns:
        A new tensor: the result on `dst`, zeros on the other ranks. The gradients of those zeros are ignored.

    Raises:
        ValueError: the tensor is floating point or complex, and `op` has no gradient.
    """
    _group_size(group)
    _check_op(op, tensor)
    result: torch.Tensor = Reduce.run(dst, op, group, tensor)
    return result


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None) -> torch.Tensor:
    """Reduces the tensors of all ranks, to every rank.

    Args:
        tensor: this rank's tensor.
        op: SUM, AVG, PRODUCT, MIN or MAX of `torch.distributed.ReduceOp`; for integer tensors also the others. In
            the backward pass of MIN and MAX, ranks that have the same extreme element share its gradient evenly;
            the backward pass of PRODUCT gathers the tensors of all ranks.
        group: the process group.

    Returns:
        A new tensor. In the backward pass each input gets the gradient of the sum of all ranks' losses.

    Raises:
        ValueError: the tensor is floating point or complex, and `op` has no gradient.
    """
    _group_size(group)
    _check_op(op, tensor)
    result: torch.Tensor = AllReduce.run(op, group, tensor)
    return result


def gather(tensor: torch.Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """Gathers the tensors of all ranks on rank `dst`.

    Args:
        tensor: this rank's tensor.
        dst: the global rank that gets the tensors.
        group: the process group.

    Returns:
        One new tensor for each rank of the group: on `dst` the tensors of the ranks, on the other ranks zeros. The
        gradients of those zeros are ignored.
    """
    _group_size(group)
    result: tuple[torch.Tensor, ...] = Gather.run(dst, group, tensor)
    return result


def scatter(tensors: Sequence[torch.Tensor], src: int = 0, group: ProcessGroup | None = None) -> torch.Tensor:
    """Sends one of rank `src`'s tensors to each rank of the group.

    Args:
        tensors: one for each rank of the group, all of one shape and dtype. The other ranks give as many tensors,
            of the same shape and dtype, whose values are ignored.
        src: the global rank of the sender.
        group: the process group.

    Returns:
        A new tensor: the one for this rank. In the backward pass, each input of `src` gets the gradient from the
        rank that it was sent to; the inputs of the other ranks get zeros.

    Raises:
        ValueError: the number of tensors is not the size of the group, or they differ in shape or dtype.
    """
    _check_list("tensors", tensors, _group_size(group), same_shape=True)
    result: torch.Tensor = Scatter.run(src, group, *tensors)
    return result


def all_gather(tensor: torch.Tensor, group: ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """Gathers the tensors of all ranks on every rank.

    Args:
        tensor: this rank's tensor.
        group: the process group.

    Returns:
        One new tensor for each rank of the group. In the backward pass, each rank's input gets the sum of the
        gradients that all ranks have for it.
    """
    _group_size(group)
    result: tuple[torch.Tensor, ...] = AllGather.run(group, None, tensor)
    return result


def _all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Gathers the tensors of all ranks on every rank, into one tensor.

    Args:
        output_tensor: receives the inputs in the order of the ranks: contiguous, of the dtype of the inputs, with
            as many elements as all inputs together.
        input_tensor: this rank's tensor.
        group: the process group.

    Returns:
        A differentiable tensor over the memory of `output_tensor`.

    Raises:
        ValueError: `output_tensor` is not contiguous.
    """
    _group_size(group)
    result: torch.Tensor = AllGather.run(group, _buffer("output_tensor", output_tensor), input_tensor)
    return result


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Reduces the i-th tensors of all ranks to rank i of the group.

    Args:
        output: receives the result: contiguous, of the shape and dtype of each input.
        input_list: one tensor for each rank of the group, all of one shape and dtype.
        op: the reduction; see `all_reduce`.
        group: the process group.

    Returns:
        A differentiable tensor over the memory of `output`.

    Raises:
        ValueError: the number of inputs is not the size of the group, they differ in shape or dtype, `output` is
            not contiguous, or it is floating point or complex and `op` has no gradient.
    """
    _check_list("input_list", input_list, _group_size(group), same_shape=True)
    _check_op(op, output)
    result: torch.Tensor = ReduceScatter.run(op, group, _buffer("output", output), *input_list)
    return result


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sends one tensor from each rank to each rank.

    Args:
        output_tensor_list: receives one tensor from each rank of the group. The i-th output has the shape of the
            tensor that rank i sends to this rank; all have one dtype.
        input_tensor_list: one tensor for each rank of the group, all of one dtype. Shapes may differ.
        group: the process group.

    Returns:
        One new, differentiable tensor from each rank of the group. Their values are also copied to
        `output_tensor_list`.

    Raises:
        ValueError: the length of a list is not the size of the group, or the tensors of a list differ in dtype.
    """
    size = _group_size(group)
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
    """Sends some rows of a tensor from each rank to each rank. Rows are slices along dimension 0.

    Args:
        output: receives the rows, in the order of the ranks that send them: contiguous, of the inputs' dtype.
        input: the rows to send, in the order of the ranks that receive them.
        output_split_sizes: the number of rows from each rank; by default the same number from all ranks.
        input_split_sizes: the number of rows to each rank; by default the same number to all ranks.
        group: the process group.

    Returns:
        A differentiable tensor over the memory of `output`.

    Raises:
        ValueError: the split sizes do not match the number of rows or ranks, or `output` is not contiguous.
    """
    size = _group_size(group)
    receive = _rows_per_rank("output", output, output_split_sizes, size)
    send = _rows_per_rank("input", input, input_split_sizes, size)
    result: torch.Tensor = AllToAll.run(group, receive, send, _buffer("output", output), input)
    return result


def _group_size(group: ProcessGroup | None) -> int:
    """Returns the number of ranks in a group. Raises ValueError if this rank is not one of them."""
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(f"rank {dist.get_rank()} is not in the group {group}: call this on its ranks only")
    return size


def _buffer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached alias of an output tensor, to be written to outside autograd.

    Increments the tensor's version counter: a graph that has saved the tensor for its backward pass then raises,
    instead of using the new content. Raises ValueError, with the name, if the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous: give tensor.contiguous(), or a new tensor "
            "to receive into"
        )
    increment_version(tensor)
    return tensor.detach()


def _check_op(op: Any, tensor: torch.Tensor) -> None:
    """Raises ValueError if a reduction of this tensor has no gradient.

    Does not look at `requires_grad`: should it differ between ranks by mistake, all ranks raise or none does.
    """
    if op not in DIFFERENTIABLE_OPS and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"op is {op}, which has no gradient: use SUM, AVG, PRODUCT, MIN or MAX, or the functions of "
            "torch.distributed itself"
        )


def _check_list(name: str, tensors: Sequence[torch.Tensor], size: int, *, same_shape: bool = False) -> None:
    """Raises ValueError unless there are `size` tensors, of one dtype and, with `same_shape`, of one shape."""
    if len(tensors) != size:
        raise ValueError(f"{name} has {len(tensors)} tensors: give one for each of the group's {size} ranks")
    for index, (a, b) in enumerate(pairwise(tensors)):
        if a.dtype != b.dtype or (same_shape and a.shape != b.shape):
            raise ValueError(
                f"{name}[{index}] is a {a.dtype} of shape {tuple(a.shape)}, but {name}[{index + 1}] a {b.dtype} "
                f"of shape {tuple(b.shape)}: give tensors of one "
                f"{'shape and dtype' if same_shape else 'dtype'}"
            )


def _rows_per_rank(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, group_size: int) -> list[int]:
    """Returns the number of rows of a tensor for each rank: the sizes, or without any the same for each.

    Raises ValueError, with the name, if they do not match the number of rows or ranks.
    """
    rows = len(tensor)
    if not sizes:
        if rows % group_size:
            raise ValueError(
                f"{name} has {rows} rows, which {group_size} ranks cannot share evenly: give {name}_split_sizes"
            )
        return [rows // group_size] * group_size
    if len(sizes) != group_size or sum(sizes) != rows:
        raise ValueError(f"{name}_split_sizes is {list(sizes)}: give {group_size} numbers whose sum is {rows}")
    return list(sizes)
