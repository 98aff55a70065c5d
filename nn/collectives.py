"""Collectives as functions of the autograd engine.

The gradient of a collective is another one, its adjoint: of broadcast it is reduce, of gather scatter, of
all_gather reduce_scatter, and the other way round; all_reduce and all_to_all are their own. Every backward
is made of the functions here, so gradients can be differentiated in turn. Where a process takes part and gets no
result, its result is zeros: that makes the adjoints exact.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "CollectiveFunction",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Scatter",
]

Gradients = tuple[torch.Tensor | None, ...]
Group = ProcessGroup | None

LINEAR = (ReduceOp.SUM, ReduceOp.AVG)


class CollectiveFunction(torch.autograd.Function):
    """A collective of a group's processes."""

    @classmethod
    def run(cls, *args: Any) -> Any:
        """`apply`, for the type checker."""
        return cls.apply(*args)  # type: ignore[no-untyped-call]


@final
class Broadcast(CollectiveFunction):
    """One process's tensor to all."""

    @staticmethod
    def forward(ctx: Any, src: int, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Receives in a copy."""
        ctx.src, ctx.group = src, group
        result = _copy(tensor)
        dist.broadcast(result, src, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """The sum to the source."""
        return None, None, Reduce.run(ctx.src, ReduceOp.SUM, ctx.group, *gradients)


@final
class Reduce(CollectiveFunction):
    """The reduction of all processes' tensors to one of them."""

    @staticmethod
    def forward(ctx: Any, dst: int, op: Any, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Reduces in a copy."""
        ctx.dst, ctx.op, ctx.group = dst, op, group
        _save(ctx, op, tensor)
        result = _copy(tensor)
        dist.reduce(result, dst, op=op, group=group)
        return result if dist.get_rank() == dst else result.zero_()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """The destination's gradient to all."""
        total = Broadcast.run(ctx.dst, ctx.group, *gradients)
        return None, None, None, _through(ctx.op, total, ctx.saved_tensors, ctx.group)


@final
class AllReduce(CollectiveFunction):
    """The reduction of all processes' tensors to all of them."""

    @staticmethod
    def forward(ctx: Any, op: Any, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Reduces in a copy."""
        ctx.op, ctx.group = op, group
        _save(ctx, op, tensor)
        result = _copy(tensor)
        dist.all_reduce(result, op=op, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """The sum to all."""
        total = AllReduce.run(ReduceOp.SUM, ctx.group, *gradients)
        return None, None, _through(ctx.op, total, ctx.saved_tensors, ctx.group)


@final
class Gather(CollectiveFunction):
    """All processes' tensors to one of them."""

    @staticmethod
    def forward(ctx: Any, dst: int, group: Group, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Zeros where they do not go."""
        ctx.dst, ctx.group = dst, group
        parts = [torch.zeros_like(_contiguous(tensor)) for _ in range(dist.get_world_size(group))]
        dist.gather(_contiguous(tensor), parts if dist.get_rank() == dst else None, dst, group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Each its own gradient."""
        return None, None, Scatter.run(ctx.dst, ctx.group, *gradients)


@final
class Scatter(CollectiveFunction):
    """One process's tensors, one to each."""

    @staticmethod
    def forward(ctx: Any, src: int, group: Group, *tensors: torch.Tensor) -> torch.Tensor:
        """The others' tensors tell what to receive."""
        ctx.src, ctx.group = src, group
        parts = [_contiguous(tensor) for tensor in tensors]
        result = torch.empty_like(parts[0])
        dist.scatter(result, parts if dist.get_rank() == src else None, src, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """All gradients to the source."""
        return None, None, *Gather.run(ctx.src, ctx.group, *gradients)


@final
class AllGather(CollectiveFunction):
    """All processes' tensors to all of them."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, output: torch.Tensor | None, tensor: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As one tensor, in `output`, if there is one."""
        ctx.group, ctx.sizes = group, tensor.shape
        tensor = _contiguous(tensor)
        if output is not None:
            dist.all_gather_into_tensor(output, tensor, group=group)
            return output.detach()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """The sum of what all have for each to it."""
        if len(gradients) == 1:  # of one tensor, or of the parts in a group of one
            gradients = gradients[0].reshape(dist.get_world_size(ctx.group), *ctx.sizes).unbind()
        output = gradients[0].new_empty(ctx.sizes)
        return None, None, ReduceScatter.run(ReduceOp.SUM, ctx.group, output, *gradients)


@final
class ReduceScatter(CollectiveFunction):
    """Reductions, one to each process."""

    @staticmethod
    def forward(ctx: Any, op: Any, group: Group, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Reduces in `output`."""
        ctx.op, ctx.group = op, group
        _save(ctx, op, *tensors)
        dist.reduce_scatter(output, [_contiguous(tensor) for tensor in tensors], op=op, group=group)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Each one's gradient to all."""
        totals = torch.stack(AllGather.run(ctx.group, None, *gradients))
        return None, None, None, *_through(ctx.op, totals, ctx.saved_tensors, ctx.group).unbind()


@final
class AllToAll(CollectiveFunction):
    """From each process some rows of a tensor to each."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        receive: Sequence[int],
        send: Sequence[int],
        output: torch.Tensor,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        """Sends so many rows to each, and receives so many of each in `output`."""
        ctx.group, ctx.receive, ctx.send = group, receive, send
        dist.all_to_all_single(output, _contiguous(tensor), list(receive), list(send), group=group)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """All the way back."""
        output = gradients[0].new_empty(sum(ctx.send), *gradients[0].shape[1:])
        return None, None, None, None, AllToAll.run(ctx.group, ctx.send, ctx.receive, output, *gradients)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.contiguous_format)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _save(ctx: Any, op: Any, *tensors: torch.Tensor) -> None:
    if op not in LINEAR:
        ctx.save_for_backward(*tensors)


def _through(op: Any, gradient: torch.Tensor, inputs: Sequence[torch.Tensor], group: Group) -> torch.Tensor:
    """The gradient of what this process put into a reduction. Called by all processes of the group.

    Args:
        op: the reduction.
        gradient: that of its result, summed over all processes that have it.
        inputs: what `_save` saved of what this process put in.
        group: the processes.
    """
    if op == ReduceOp.SUM:
        return gradient
    if op == ReduceOp.AVG:
        return gradient / dist.get_world_size(group)
    own = torch.stack(list(inputs)).reshape(gradient.shape)
    if op == ReduceOp.PRODUCT:
        # Those of the others are gathered, not divided out of the product: there may be zeros.
        parts = list(AllGather.run(group, None, own))
        del parts[dist.get_rank(group)]
        return gradient * torch.stack([torch.ones_like(own), *parts]).prod(0).conj()
    # MIN and MAX. As in torch.amin and amax, those that are equal share the gradient.
    extreme: torch.Tensor = AllReduce.run(op, group, own.detach())
    chosen = (own == extreme).to(gradient.dtype)
    number: torch.Tensor = AllReduce.run(ReduceOp.SUM, group, chosen)
    return gradient * chosen / number
