"""Collectives of processes that each use several GPUs: each process gives one tensor for each of them.

torch.distributed had them until 2.0; names and arguments are as they were. The group must be on gradwire's engine
`nccl`. Each of the `world size * GPUs` tensors counts as one: rank r's i-th is number `r * GPUs + i`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedOperationError
from .call import CollectiveCall, Step
from .checks import check_parts, check_reduction
from .engines.nccl import NcclEngine, plans
from .engines.nccl.plans import GpuRank, Plan
from .process_group import ProcessGroup
from .reductions import Reduction
from .staging import Staging
from .torch_types import TorchWork

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
    """Every tensor of every rank becomes the `src_tensor`-th of rank `src`.

    Args:
        tensor_list: one tensor for each GPU of this process, all of one size and dtype. Changed in place.
        src: rank in the default group.
        group: the default group if None.
        async_op: return a Work at once.
        src_tensor: which of the tensors of rank `src`.

    Returns:
        A Work if `async_op`; else None, after the current streams wait for the result.

    Raises:
        ValueError: the tensors do not fit together, or there is no such rank or tensor.
        UnsupportedOperationError: the group is not on engine `nccl`.
    """
    name = "broadcast_multigpu"
    whole = _checked(name, group, tensor_list)
    root = _root(name, whole, src, "src_tensor", src_tensor, len(tensor_list))
    staging = Staging()
    tensors = staging.outputs(tensor_list)
    steps = [partial(plans.broadcast, tensor=tensor, root=root) for tensor in tensors]
    return _start(name, whole, tensors, tensors, steps, staging, tensor_list, tensor_list, async_op=async_op)


def all_reduce_multigpu(
    tensor_list: Tensors, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> TorchWork | None:
    """Every tensor of every rank becomes the reduction of all. Arguments and errors as in broadcast_multigpu."""
    name = "all_reduce_multigpu"
    whole = _checked(name, group, tensor_list)
    reduction = Reduction.of(op)
    check_reduction(name, reduction, tensor_list)
    staging = Staging()
    tensors = staging.outputs(tensor_list)
    steps = [partial(plans.all_reduce, tensor=tensor, reduction=reduction) for tensor in tensors]
    return _start(name, whole, tensors, tensors, steps, staging, tensor_list, tensor_list, async_op=async_op)


def reduce_multigpu(
    tensor_list: Tensors,
    dst: int,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> TorchWork | None:
    """The `dst_tensor`-th tensor of rank `dst` becomes the reduction of all tensors; the others may change or not.

    Arguments and errors as in broadcast_multigpu.
    """
    name = "reduce_multigpu"
    whole = _checked(name, group, tensor_list)
    root = _root(name, whole, dst, "dst_tensor", dst_tensor, len(tensor_list))
    reduction = Reduction.of(op)
    check_reduction(name, reduction, tensor_list)
    staging = Staging()
    tensors = staging.outputs(tensor_list)
    steps = [partial(plans.reduce, tensor=tensor, root=root, reduction=reduction) for tensor in tensors]
    return _start(name, whole, tensors, tensors, steps, staging, tensor_list, tensor_list, async_op=async_op)


def all_gather_multigpu(
    output_tensor_lists: Sequence[Tensors], input_tensor_list: Tensors, group: Any = None, async_op: bool = False
) -> TorchWork | None:
    """Each of the lists of outputs becomes the tensors of all GPUs of all ranks.

    Args:
        output_tensor_lists: for each GPU of this process a list of `world size * GPUs` tensors on it.
        input_tensor_list: one tensor for each GPU of this process, all of one size and dtype.
        group: as in broadcast_multigpu, and so are `async_op`, what is returned and what is raised.
        async_op: return a Work at once.
    """
    name = "all_gather_multigpu"
    whole = _checked(name, group, input_tensor_list)
    _check_lists(name, "outputs", output_tensor_lists, whole.size(), input_tensor_list)
    staging = Staging()
    lists = [staging.outputs(outputs) for outputs in output_tensor_lists]
    tensors = staging.inputs(input_tensor_list)
    steps = [
        partial(plans.all_gather, outputs=outputs, tensor=tensor)
        for outputs, tensor in zip(lists, tensors, strict=True)
    ]
    kept = [*tensors, *(output for outputs in lists for output in outputs)]
    written = [output for outputs in output_tensor_lists for output in outputs]
    return _start(name, whole, tensors, kept, steps, staging, input_tensor_list, written, async_op=async_op)


def reduce_scatter_multigpu(
    output_tensor_list: Tensors,
    input_tensor_lists: Sequence[Tensors],
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> TorchWork | None:
    """The i-th output of rank r becomes the reduction of the `r * GPUs + i`-th inputs of all GPUs of all ranks.

    Args:
        output_tensor_list: one tensor for each GPU of this process, all of one size and dtype.
        input_tensor_lists: for each GPU of this process a list of `world size * GPUs` tensors on it.
        op: how.
        group: as in broadcast_multigpu, and so are `async_op`, what is returned and what is raised.
        async_op: return a Work at once.
    """
    name = "reduce_scatter_multigpu"
    whole = _checked(name, group, output_tensor_list)
    _check_lists(name, "inputs", input_tensor_lists, whole.size(), output_tensor_list)
    reduction = Reduction.of(op)
    check_reduction(name, reduction, output_tensor_list)
    staging = Staging()
    tensors = staging.outputs(output_tensor_list)
    lists = [staging.inputs(inputs) for inputs in input_tensor_lists]
    steps = [
        partial(plans.reduce_scatter, tensor=tensor, inputs=inputs, reduction=reduction)
        for tensor, inputs in zip(tensors, lists, strict=True)
    ]
    kept = [*tensors, *(each for inputs in lists for each in inputs)]
    read = [each for inputs in input_tensor_lists for each in inputs]
    return _start(name, whole, tensors, kept, steps, staging, read, output_tensor_list, async_op=async_op)


def _checked(name: str, group: Any, tensors: Tensors) -> ProcessGroup:
    """The group, if it can do this with these tensors."""
    whole = dist.group.WORLD if group is None else group
    if not isinstance(whole, ProcessGroup):
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
    engine = whole.engine(first.device.type)
    if not isinstance(engine, NcclEngine):
        raise UnsupportedOperationError(engine.name, name, "make the group with backend 'nccl'")
    return whole


def _check_lists(name: str, what: str, lists: Sequence[Tensors], size: int, tensors: Tensors) -> None:
    """For each tensor there is a list of one for each tensor of all ranks, as large as it and where it is."""
    if len(lists) != len(tensors):
        raise ValueError(
            f"{name} takes a list of {what} for each of the {len(tensors)} GPUs, but got {len(lists)}"
        )
    for parts, tensor in zip(lists, tensors, strict=True):
        check_parts(name, what, parts, size * len(tensors))
        for part in parts:
            if part.dtype != tensor.dtype or part.device != tensor.device or part.numel() != tensor.numel():
                raise ValueError(
                    f"{name}: the {what} for {tensor.device} must be of its size and dtype, and there"
                )


def _root(name: str, group: ProcessGroup, rank: int, what: str, index: int, count: int) -> int:
    """The number of a tensor among those of all ranks."""
    if not 0 <= index < count:
        raise ValueError(f"{name}: {what} is {index}, but there are {count} tensors")
    return dist.get_group_rank(group, rank) * count + index


def _start(
    name: str,
    group: ProcessGroup,
    tensors: Tensors,
    kept: Tensors,
    steps: Steps,
    staging: Staging,
    inputs: Tensors,
    outputs: Tensors,
    *,
    async_op: bool,
) -> TorchWork | None:
    return group.start(
        CollectiveCall(
            name=name,
            inputs=inputs,
            outputs=outputs,
            device=tensors[0].device,
            steps=[Step("multigpu", name, tensors, kept, steps)],
            staging=staging,
            result=list(outputs),
            now=not async_op,
        )
    )
