"""Sums of sparse tensors, which DDP needs for embeddings with sparse gradients."""

from typing import final

import torch
from torch import Tensor

from ..engines.base import Engine

__all__ = ["SparseSum"]


@final
class SparseSum:
    """A step (see collective_call.Step) that reduces a sparse COO tensor over all ranks, in place.

    Every rank gathers the indices and values of all ranks and adds the values of each index in the order of the
    ranks, so that all ranks get the same bits.

    Args:
        tensor: this rank's sparse COO tensor, of the same shape on all ranks. The number of entries may differ.
        average: divide the sum by the number of ranks.
    """

    operation = "all_reduce"

    def __init__(self, tensor: Tensor, *, average: bool) -> None:
        self._tensor = tensor
        self._average = average

    def __call__(self, engine: Engine, timeout_s: float) -> None:
        """Runs the step and waits until it is done. Each of its gathers may take `timeout_s` seconds."""
        own = self._tensor.coalesce()
        indices, values = own.indices(), own.values()
        count = torch.tensor([own._nnz()], device=values.device)
        counts = [int(each) for each in _gather(engine, [1] * engine.size, count, timeout_s)]
        all_indices = _gather(engine, [n * len(indices) for n in counts], indices, timeout_s)
        width = values.shape[1:].numel()
        all_values = _gather(engine, [n * width for n in counts], values, timeout_s)
        total = torch.sparse_coo_tensor(
            torch.cat([part.view(len(indices), n) for n, part in zip(counts, all_indices, strict=True)], 1),
            torch.cat([part.view(n, *values.shape[1:]) for n, part in zip(counts, all_values, strict=True)]),
            own.shape,
        ).coalesce()
        self._tensor.copy_(total / engine.size if self._average else total)


def _gather(engine: Engine, sizes: list[int], tensor: Tensor, timeout_s: float) -> list[Tensor]:
    """Returns the flattened tensors of all ranks, which have these numbers of elements."""
    outputs = [tensor.new_empty(size) for size in sizes]
    pending = engine.all_gather(outputs, tensor.contiguous().view(-1), timeout_s)
    if pending is not None:
        pending.wait(None)
    return outputs
