"""Collectives as torch.autograd.Functions.

A collective is linear in the tensors of all ranks, so its backward pass is the adjoint collective: broadcast and
reduce are each other's, and so are gather and scatter, and all_gather and reduce_scatter; all_reduce and
all_to_all are their own. Every backward is made of the Functions here, so gradients can be differentiated again. A
rank that takes part but gets no result returns zeros, which makes the adjoints exact.

Reductions other than SUM and AVG are not linear; `_gradient_of_reduction` applies their derivative.
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
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Scatter",
]

Gradients = tuple[torch.Tensor | None, ...]
"""One gradient for each argument of `forward` after `ctx`; None for those that are not tensors."""

Group = ProcessGroup | None

LINEAR_OPS = (ReduceOp.SUM, ReduceOp.AVG)


class _CollectiveFunction(torch.autograd.Function):
    """A collective of the ranks of a process group."""

    @classmethod
    def run(cls, *args: Any) -> Any:
        """Calls `apply`, which torch declares without types."""
        return cls.apply(*args)  # type: ignore[no-untyped-call]


@final
class Broadcast(_CollectiveFunction):
    """Sends the tensor of rank `src` to every rank."""

    @staticmethod
    def forward(ctx: Any, src: int, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Receives into a copy of the input, which stays unchanged."""
        ctx.src, ctx.group = src, group
        result = _copy(tensor)
        dist.broadcast(result, src, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Reduces the gradients to `src`."""
        return None, None, Reduce.run(ctx.src, ReduceOp.SUM, ctx.group, *gradients)


@final
class Reduce(_CollectiveFunction):
    """Reduces the tensors of all ranks to rank `dst`."""

    @staticmethod
    def forward(ctx: Any, dst: int, op: Any, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Reduces into a copy of the input, which stays unchanged."""
        ctx.dst, ctx.op, ctx.group = dst, op, group
        _save_inputs(ctx, op, tensor)
        result = _copy(tensor)
        dist.reduce(result, dst, op=op, group=group)
        return result if dist.get_rank() == dst else result.zero_()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Broadcasts the gradient of `dst`."""
        total = Broadcast.run(ctx.dst, ctx.group, *gradients)
        return None, None, None, _gradient_of_reduction(ctx.op, total, ctx.saved_tensors, ctx.group)


@final
class AllReduce(_CollectiveFunction):
    """Reduces the tensors of all ranks, to every rank."""

    @staticmethod
    def forward(ctx: Any, op: Any, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Reduces into a copy of the input, which stays unchanged."""
        ctx.op, ctx.group = op, group
        _save_inputs(ctx, op, tensor)
        result = _copy(tensor)
        dist.all_reduce(result, op=op, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Reduces the gradients to every rank."""
        total = AllReduce.run(ReduceOp.SUM, ctx.group, *gradients)
        return None, None, _gradient_of_reduction(ctx.op, total, ctx.saved_tensors, ctx.group)


@final
class Gather(_CollectiveFunction):
    """Gathers the tensors of all ranks on rank `dst`."""

    @staticmethod
    def forward(ctx: Any, dst: int, group: Group, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns zeros on the ranks other than `dst`."""
        ctx.dst, ctx.group = dst, group
        parts = [torch.zeros_like(_contiguous(tensor)) for _ in range(dist.get_world_size(group))]
        dist.gather(_contiguous(tensor), parts if dist.get_rank() == dst else None, dst, group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Scatters the gradients from `dst`."""
        return None, None, Scatter.run(ctx.dst, ctx.group, *gradients)


@final
class Scatter(_CollectiveFunction):
    """Sends one of rank `src`'s tensors to each rank."""

    @staticmethod
    def forward(ctx: Any, src: int, group: Group, *tensors: torch.Tensor) -> torch.Tensor:
        """Receives into a tensor like the first of this rank's own."""
        ctx.src, ctx.group = src, group
        parts = [_contiguous(tensor) for tensor in tensors]
        result = torch.empty_like(parts[0])
        dist.scatter(result, parts if dist.get_rank() == src else None, src, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Gathers the gradients on `src`."""
        return None, None, *Gather.run(ctx.src, ctx.group, *gradients)


@final
class AllGather(_CollectiveFunction):
    """Gathers the tensors of all ranks on every rank."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, output: torch.Tensor | None, tensor: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Returns one tensor over the memory of `output`, or without an `output` one tensor for each rank."""
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
        """Reduces and scatters the gradients."""
        if len(gradients) == 1:  # of the one output tensor; a group of one rank also gets here
            gradients = gradients[0].reshape(dist.get_world_size(ctx.group), *ctx.sizes).unbind()
        output = gradients[0].new_empty(ctx.sizes)
        return None, None, ReduceScatter.run(ReduceOp.SUM, ctx.group, output, *gradients)


@final
class ReduceScatter(_CollectiveFunction):
    """Reduces the i-th tensors of all ranks to rank i of the group."""

    @staticmethod
    def forward(ctx: Any, op: Any, group: Group, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Receives into the memory of `output`."""
        ctx.op, ctx.group = op, group
        _save_inputs(ctx, op, *tensors)
        dist.reduce_scatter(output, [_contiguous(tensor) for tensor in tensors], op=op, group=group)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Gathers the gradients of all ranks."""
        totals = torch.stack(AllGather.run(ctx.group, None, *gradients))
        return None, None, None, *_gradient_of_reduction(ctx.op, totals, ctx.saved_tensors, ctx.group).unbind()


@final
class AllToAll(_CollectiveFunction):
    """Sends some rows of a tensor from each rank to each rank."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        receive: Sequence[int],
        send: Sequence[int],
        output: torch.Tensor,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        """Sends `send[i]` rows to rank i of the group, and receives `receive[i]` rows from it into `output`."""
        ctx.group, ctx.receive, ctx.send = group, receive, send
        dist.all_to_all_single(output, _contiguous(tensor), list(receive), list(send), group=group)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        """Sends the gradient of each row back to the rank that sent the row."""
        output = gradients[0].new_empty(sum(ctx.send), *gradients[0].shape[1:])
        return None, None, None, None, AllToAll.run(ctx.group, ctx.send, ctx.receive, output, *gradients)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.contiguous_format)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, op: Any, *tensors: torch.Tensor) -> None:
    """Saves the inputs of a reduction if its gradient depends on them."""
    if op not in LINEAR_OPS:
        ctx.save_for_backward(*tensors)


def _gradient_of_reduction(
    op: Any, gradient: torch.Tensor, inputs: Sequence[torch.Tensor], group: Group
) -> torch.Tensor:
    """Returns the gradient of a reduction with respect to this rank's inputs. A collective for most ops.

    `gradient` is that of the result, summed over all ranks that got it. For SUM and AVG there are no `inputs`.
    """
    if op == ReduceOp.SUM:
        return gradient
    if op == ReduceOp.AVG:
        return gradient / dist.get_world_size(group)
    own = torch.stack(list(inputs)).reshape(gradient.shape)
    if op == ReduceOp.PRODUCT:
        # The others' inputs are gathered: dividing the product by the own input would fail at zeros.
        others = list(AllGather.run(group, None, own))
        del others[dist.get_rank(group)]
        return gradient * torch.stack([torch.ones_like(own), *others]).prod(0).conj()
    # MIN and MAX: equal extreme elements share the gradient evenly, as in torch.amin and torch.amax.
    extreme: torch.Tensor = AllReduce.run(op, group, own.detach())
    chosen = (own == extreme).to(gradient.dtype)
    count: torch.Tensor = AllReduce.run(ReduceOp.SUM, group, chosen)
    return gradient * chosen / count
