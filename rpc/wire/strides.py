"""Strides of tensors: which survive a transfer, and how the receiver restores them.

Sizes and strides count elements, as in torch.
"""

import math
from collections.abc import Sequence

import torch

__all__ = [
    "MAX_DIMENSIONS",
    "can_keep_strides",
    "dims_by_descending_stride",
    "is_shape",
    "restore_strides",
    "span",
]

MAX_DIMENSIONS = 64
"""Dimensions of a tensor. torch has operators for no more."""

MAX_GAP_FACTOR = 4
"""A tensor arrives with its strides if it spans at most this many times the memory of its elements."""


def is_shape(sizes: Sequence[int]) -> bool:
    """Returns whether these are the sizes of a tensor, if it has the elements that they say."""
    if len(sizes) > MAX_DIMENSIONS or (sizes and min(sizes) < 0):
        return False
    return 0 not in sizes or math.prod(size or 1 for size in sizes[1:]) < 1 << 63  # torch's strides have 64 bits


def dims_by_descending_stride(strides: Sequence[int]) -> list[int]:
    """Returns the dimensions, that of the largest stride first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements of memory there are from the first element to the last, both included."""
    if not math.prod(sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def can_keep_strides(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a tensor can be rebuilt with these strides: no elements overlap, and gaps are few."""
    if len(strides) != len(sizes):
        return False
    reach = 1
    for dim in reversed(dims_by_descending_stride(strides)):
        if sizes[dim] > 1:
            if strides[dim] < reach:
                return False
            reach += (sizes[dim] - 1) * strides[dim]
    return reach <= MAX_GAP_FACTOR * math.prod(sizes)


def restore_strides(flat: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns a tensor of these sizes and strides.

    Args:
        flat: the elements, of shape `(prod(sizes),)`: row-major, or by descending stride if there are strides. The
            result shares its memory unless there are gaps between the elements.
        sizes: the shape.
        strides: one for each dimension; none for a contiguous tensor.

    Raises:
        ValueError: `can_keep_strides` does not hold, or a stride is negative.
    """
    if not strides:
        return flat.view(tuple(sizes))
    if min(strides) < 0 or not can_keep_strides(sizes, strides):
        raise ValueError(f"malformed tensor: strides {tuple(strides)} for shape {tuple(sizes)}")
    order = dims_by_descending_stride(strides)
    tensor = flat.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
    if tensor.stride() == tuple(strides):
        return tensor
    return torch.empty_strided(sizes, strides, dtype=flat.dtype, device=flat.device).copy_(tensor)
