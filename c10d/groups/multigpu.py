"""Collectives for processes that use several GPUs each, with one tensor for each GPU.

torch.distributed had these functions until 2.0, with the same names and arguments. The group must use gradwire's
engine `nccl`. With G GPUs in each process, the i-th tensor of rank r is number `r * G + i` of `world size * G`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...errors import UnsupportedOperationError
from ..engines.collective_call import CollectiveCall, step_of
from ..engines.nccl import NcclEngine, plans
from ..engines.nccl.plans import GpuRank, Plan
from ..engines.reductions import Reduction
from ..engines.staging import Staging
from ..torch_types import TorchWork
from .collectives import check_parts, check_reduction
from .process_group import ProcessGroup

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
    "reduce_scatter_multigpu",
]

Tensors = Sequence[Tensor]
Steps = Sequence[Callable[[GpuRank], Plan]]


def broadcast_multigpu(
    tensor_list: Tensors, src: int, group: Any = None, async_op: bool = False, src_tensor: int = 0
) -> TorchWork | None:
    """Copies the `src_tensor`-th tensor of rank `src` to every tensor of every rank.

    Args:
        tensor_list: one tensor for each GPU of this process, all of one size and dtype. Changed in place.
        src: rank in the default group.
        group: the default group if None.
        async_op: return a Work at once.
        src_tensor: index among the tensors of rank `src`.

    Returns:
        A Work if `async_op`; else None, after the current streams have been made to wait for the result.

    Raises:
        ValueError: the tensors differ in size or dtype, or there is no such rank or tensor.
        UnsupportedOperationError: the group does not use engine `nccl`.
    """
    name = "broadcast_multigpu"
    target = _checked_group(name, group, tensor_list)
    root = _root(name, target, src, "src_tensor", src_tensor, len(tensor_list))
    return _start_in_place(target, name, tensor_list, partial(plans.broadcast, root=root), async_op=async_op)


def all_reduce_multigpu(
    tensor_list: Tensors, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> TorchWork | None:
    """Reduces all tensors of all ranks into each of them. Arguments and errors as in broadcast_multigpu."""
    name = "all_reduce_multigpu"
    target = _checked_group(name, group, tensor_list)
    reduction = Reduction.of(op)
    check_reduction(name, reduction, tensor_list)
    plan = partial(plans.all_reduce, reduction=reduction)
    return _start_in_place(target, name, tensor_list, plan, async_op=async_op)


def reduce_multigpu(
    tensor_list: Tensors,
    dst: int,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> TorchWork | None:
    """Reduces all tensors of all ranks into the `dst_tensor`-th of rank `dst`; the others may change or not.

    Arguments and errors as in broadcast_multigpu.
    """
    name = "reduce_multigpu"
    target = _checked_group(name, group, tensor_list)
    root = _root(name, target, dst, "dst_tensor", dst_tensor, len(tensor_list))
    reduction = Reduction.of(op)
    check_reduction(name, reduction, tensor_list)
    plan = partial(plans.reduce, root=root, reduction=reduction)
    return _start_in_place(target, name, tensor_list, plan, async_op=async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Tensors], input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> TorchWork | None:
    """Copies the tensors of all GPUs of all ranks into each list of outputs.

    Returns and raises the same as broadcast_multigpu.

    Args:
        output_tensor_lists: for each GPU of this process a list of `world size * GPUs` tensors on it.
        input_tensor_list: one tensor for each GPU of this process, all of one size and dtype.
        group: the default group if None.
        async_op: return a Work at once.
    """
    name = "all_gather_multigpu"
    target = _checked_group(name, group, input_tensor_list)
    _check_lists(name, "outputs", output_tensor_lists, target.size(), input_tensor_list)
    staging = Staging()
    lists = [staging.outputs(outputs) for outputs in output_tensor_lists]
    tensors = staging.inputs(input_tensor_list)
    steps = [
        partial(plans.all_gather, outputs=outputs, tensor=tensor)
        for outputs, tensor in zip(lists, tensors, strict=True)
    ]
    step = step_of("multigpu", name, tensors, [*tensors, *chain(*lists)], steps)
    written = list(chain(*output_tensor_lists))
    call = CollectiveCall(name, [step], staging, input_tensor_list, written, _options(async_op=async_op))
    return target.start(call)


def reduce_scatter_multigpu(
    output_tensor_list: Tensors,
    input_tensor_lists: Sequence[Tensors],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> TorchWork | None:
    """Reduces the `r * GPUs + i`-th inputs of all GPUs of all ranks into the i-th output of rank r.

    Returns and raises the same as broadcast_multigpu.

    Args:
        output_tensor_list: one tensor for each GPU of this process, all of one size and dtype.
        input_tensor_lists: for each GPU of this process a list of `world size * GPUs` tensors on it.
        op: the reduction, a torch.distributed.ReduceOp.
        group: the default group if None.
        async_op: return a Work at once.
    """
    name = "reduce_scatter_multigpu"
    target = _checked_group(name, group, output_tensor_list)
    _check_lists(name, "inputs", input_tensor_lists, target.size(), output_tensor_list)
    reduction = Reduction.of(op)
    check_reduction(name, reduction, output_tensor_list)
    staging = Staging()
    tensors = staging.outputs(output_tensor_list)
    lists = [staging.inputs(inputs) for inputs in input_tensor_lists]
    steps = [
        partial(plans.reduce_scatter, tensor=tensor, inputs=inputs, reduction=reduction)
        for tensor, inputs in zip(tensors, lists, strict=True)
    ]
    step = step_of("multigpu", name, tensors, [*tensors, *chain(*lists)], steps)
    read = list(chain(*input_tensor_lists))
    call = CollectiveCall(name, [step], staging, read, output_tensor_list, _options(async_op=async_op))
    return target.start(call)


def _checked_group(name: str, group: Any, tensors: Tensors) -> ProcessGroup:
    """Returns the group after checking its engine, which must be `nccl`, and the tensors."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        raise ValueError(f"{name} needs a group of gradwire, such as that of init_process_group('nccl')")
    if not tensors:
        raise ValueError(f"{name} needs at least one tensor, one for each GPU of this process")
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.numel() != first.numel() or tensor.is_sparse:
            raise ValueError(
                f"{name} takes dense tensors of one size and dtype, but got {tuple(first.shape)} of {first.dtype} "
                f"and {tuple(tensor.shape)} of {tensor.dtype}"
            )
    engine = found.engine(first.device.type)
    if not isinstance(engine, NcclEngine):
        raise UnsupportedOperationError(engine.name, name, "make the group with backend 'nccl'")
    return found


def _check_lists(name: str, what: str, lists: Sequence[Tensors], size: int, tensors: Tensors) -> None:
    """Checks that there is a list for each tensor of this process, with one like it for each of all ranks."""
    if len(lists) != len(tensors):
        raise ValueError(
            f"{name} takes a list of {what} for each of the {len(tensors)} GPUs, but got {len(lists)}"
        )
    for parts, tensor in zip(lists, tensors, strict=True):
        check_parts(name, what, parts, size * len(tensors))
        for part in parts:
            if part.dtype != tensor.dtype or part.device != tensor.device or part.numel() != tensor.numel():
                raise ValueError(
                    f"{name}: each of the {what} for {tensor.device} must be on it, with {tensor.numel()} "
                    f"elements of {tensor.dtype}; got {part.numel()} of {part.dtype} on {part.device}"
                )


def _root(name: str, group: ProcessGroup, rank: int, what: str, index: int, count: int) -> int:
    """Returns the number, among the tensors of all ranks, of a rank's tensor of this index."""
    if not 0 <= index < count:
        raise ValueError(f"{name}: {what} is {index}, but there are {count} tensors")
    return dist.get_group_rank(group, rank) * count + index


def _start_in_place(
    group: ProcessGroup, name: str, tensors: Tensors, plan: Callable[..., Plan], *, async_op: bool
) -> TorchWork | None:
    staging = Staging()
    staged = staging.outputs(tensors)
    step = step_of("multigpu", name, staged, staged, [partial(plan, tensor=tensor) for tensor in staged])
    return group.start(CollectiveCall(name, [step], staging, tensors, tensors, _options(async_op=async_op)))


def _options(*, async_op: bool) -> Any:
    """Returns options as those with which torch.distributed's functions call a group."""
    options = dist.AllreduceOptions()
    options.asyncOp = async_op
    return options
