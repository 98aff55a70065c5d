"""Where the elements of a tensor are in memory."""

import math
from collections.abc import Sequence

import torch

__all__ = ["arrange", "by_falling_stride", "can_keep", "span"]

MAX_GAP_FACTOR = 4
"""A tensor arrives with its strides if it spans at most this many times the memory of its elements."""


def by_falling_stride(strides: Sequence[int]) -> list[int]:
    """The dimensions, that of the largest stride first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory there are from the first element to the last, both included."""
    if not math.prod(sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def can_keep(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Can a tensor of these sizes be laid out with these strides: no two elements at one place, few gaps?"""
    if len(strides) != len(sizes):
        return False
    reach = 1
    for dim in reversed(by_falling_stride(strides)):
        if sizes[dim] > 1:
            if strides[dim] < reach:
                return False
            reach += (sizes[dim] - 1) * strides[dim]
    return reach <= MAX_GAP_FACTOR * math.prod(sizes)


def arrange(flat: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The elements as a tensor of these sizes, and strides if there are any.

    Raises:
        ValueError: the strides are not such as `can_keep` allows.
    """
    if not strides:
        return flat.view(tuple(sizes))
    if not can_keep(sizes, strides):
        raise ValueError(f"malformed tensor: strides {tuple(strides)} for shape {tuple(sizes)}")
    order = by_falling_stride(strides)
    tensor = flat.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(sizes, strides, dtype=flat.dtype).copy_(tensor)
