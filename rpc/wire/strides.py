"""Strides of tensors: which survive a transfer, and how the receiver restores them.

Sizes and strides count elements, as in torch. A tensor that repeats its memory, as an expanded one or a window
does, is sent as it is in memory: an element that it has several times is sent once.
"""

import math
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache

import torch

__all__ = [
    "MAX_DIMENSIONS",
    "Memory",
    "count_sent",
    "dims_by_descending_stride",
    "has_no_gaps",
    "is_shape",
    "memory_of",
    "restore_strides",
    "span",
    "without_repeats",
]

MAX_DIMENSIONS = 64
"""Dimensions of a tensor. torch has operators for no more."""

MAX_GAP_FACTOR = 4
"""A tensor arrives with its strides if it spans at most this many times the memory of its elements."""

MAX_BYTES = 1 << 62
"""Bytes that the elements of a tensor have at most, if repeated ones are counted each time: torch counts them."""


class Memory(Enum):
    """How the elements of a tensor are in memory, apart from its dimensions of stride 0."""

    PLAIN = auto()
    """No two are the same, and gaps are few: sent without the gaps, which the receiver restores."""
    GAPS = auto()
    """No two are the same, and there are many gaps: sent without them, and contiguous at the receiver."""
    WINDOWS = auto()
    """Some are in several places of the tensor: the memory is sent, from the first element to the last."""
    SCATTERED = auto()
    """As WINDOWS, but that memory is more than the elements: sent and received as a contiguous tensor."""


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


def without_repeats(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Returns the sizes, with 1 for each dimension of stride 0."""
    return [size if stride else 1 for size, stride in zip(sizes, strides, strict=True)]


def memory_of(sizes: Sequence[int], strides: Sequence[int]) -> Memory:
    """Returns how a tensor that has elements is in memory. Strides must not be negative."""
    once = without_repeats(sizes, strides)
    reach = 1
    for dim in reversed(dims_by_descending_stride(strides)):
        if once[dim] > 1:
            if strides[dim] < reach:
                return Memory.WINDOWS if span(sizes, strides) <= math.prod(sizes) else Memory.SCATTERED
            reach += (once[dim] - 1) * strides[dim]
    return Memory.PLAIN if reach <= MAX_GAP_FACTOR * math.prod(once) else Memory.GAPS


def has_no_gaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a tensor that has elements fills its memory, each element with another one."""
    return span(sizes, strides) == math.prod(sizes) and memory_of(sizes, strides) is Memory.PLAIN


@lru_cache(maxsize=1024)
def count_sent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns how many elements are sent of a tensor, which has no strides here if it is contiguous."""
    if not strides or not math.prod(sizes):
        return math.prod(sizes)
    memory = memory_of(sizes, strides)
    if memory is Memory.SCATTERED:
        return math.prod(sizes)
    return span(sizes, strides) if memory is Memory.WINDOWS else math.prod(without_repeats(sizes, strides))


def restore_strides(flat: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns a tensor of these sizes and strides; without strides it is contiguous.

    `flat` is what was sent of its elements, of one dimension: in row-major order; if there are strides, by
    descending stride, the first ones only along dimensions of stride 0; the memory of WINDOWS. The result shares
    its memory unless there are gaps between the elements. Raises ValueError if no tensor of these strides is sent
    so, or not by so many elements.
    """
    if not strides:
        return flat.view(tuple(sizes))
    if (
        len(strides) != len(sizes)
        or min(strides) < 0
        or math.prod(sizes) * flat.itemsize > MAX_BYTES
        or (memory := memory_of(sizes, strides)) not in (Memory.PLAIN, Memory.WINDOWS)
        or flat.numel() != count_sent(tuple(sizes), tuple(strides))
    ):
        raise ValueError(f"malformed tensor: strides {tuple(strides)} for shape {tuple(sizes)}")
    if memory is Memory.WINDOWS:
        return flat.as_strided(tuple(sizes), tuple(strides), flat.storage_offset())
    once, order = without_repeats(sizes, strides), dims_by_descending_stride(strides)
    tensor = flat.view([once[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
    if any(once[dim] > 1 and tensor.stride(dim) != strides[dim] for dim in order):
        tensor = torch.empty_strided(once, strides, dtype=flat.dtype, device=flat.device).copy_(tensor)
    return tensor.as_strided(tuple(sizes), tuple(strides), tensor.storage_offset())
