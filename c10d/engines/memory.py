"""Tensors as bytes. They are contiguous and on the CPU; torch's own operations cost more than moving a few KiB."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_bytes", "copy", "flat", "join", "spread"]

copy = ctypes.memmove
"""To an address, from an address, so many bytes."""


def flat(tensor: Tensor) -> Tensor:
    """Itself in one dimension."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Its bytes, in place."""
    return flat(tensor).view(torch.uint8)


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all, one after another."""
    whole = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    place = whole.data_ptr()
    for tensor in tensors:
        copy(place, tensor.data_ptr(), tensor.nbytes)
        place += tensor.nbytes
    return whole


def spread(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fills the tensors with the bytes of another, one after another."""
    place = whole.data_ptr()
    for tensor in tensors:
        copy(tensor.data_ptr(), place, tensor.nbytes)
        place += tensor.nbytes
