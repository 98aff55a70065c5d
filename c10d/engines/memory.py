"""Copies the bytes of contiguous CPU tensors. For a few KiB this is cheaper than torch's own operations."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_bytes", "flat", "join_bytes", "memmove", "split_bytes"]

memmove = ctypes.memmove
"""C's memmove: destination address, source address, number of bytes."""


def flat(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view of a contiguous tensor."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional uint8 view of a contiguous tensor."""
    return flat(tensor).view(torch.uint8)


def join_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a new uint8 tensor with the bytes of all tensors, one after another."""
    whole = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    address = whole.data_ptr()
    for tensor in tensors:
        memmove(address, tensor.data_ptr(), tensor.nbytes)
        address += tensor.nbytes
    return whole


def split_bytes(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fills the tensors, one after another, with the bytes of `whole`."""
    address = whole.data_ptr()
    for tensor in tensors:
        memmove(tensor.data_ptr(), address, tensor.nbytes)
        address += tensor.nbytes
