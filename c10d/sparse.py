"""Sums of sparse tensors, which DDP asks for where embeddings have sparse gradients."""

from typing import final

import torch
from torch import Tensor

from .engines.base import Engine

__all__ = ["SparseSum"]


@final
class SparseSum:
    """A step that makes a sparse COO tensor the sum, or the average, of those of all ranks.

    All ranks gather indices and values, and add what is at one index in the order of ranks; so all get the same.
    """

    operation = "all_reduce"

    def __init__(self, tensor: Tensor, *, average: bool) -> None:
        self._tensor = tensor
        self._average = average

    def __call__(self, engine: Engine, seconds: float) -> None:
        """Does it, also on engines that do not block."""
        mine = self._tensor.coalesce()
        indices, values = mine.indices(), mine.values()
        counts = _gather(engine, [1] * engine.size, torch.tensor([mine._nnz()], device=values.device), seconds)
        entries = [int(count) for count in counts]
        all_indices = _gather(engine, [n * len(indices) for n in entries], indices, seconds)
        width = values.shape[1:].numel()
        all_values = _gather(engine, [n * width for n in entries], values, seconds)
        total = torch.sparse_coo_tensor(
            torch.cat([part.view(len(indices), n) for n, part in zip(entries, all_indices, strict=True)], 1),
            torch.cat([part.view(n, *values.shape[1:]) for n, part in zip(entries, all_values, strict=True)]),
            mine.shape,
        ).coalesce()
        self._tensor.copy_(total / engine.size if self._average else total)


def _gather(engine: Engine, sizes: list[int], tensor: Tensor, seconds: float) -> list[Tensor]:
    """Every rank's tensor, flat, of which each has its own size."""
    outputs = [tensor.new_empty(size) for size in sizes]
    pending = engine.all_gather(outputs, tensor.contiguous().view(-1), seconds)
    if pending is not None:
        pending.wait(None)
    return outputs
