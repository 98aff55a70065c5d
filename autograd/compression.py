"""Gradients as they travel.

The gradient of a sum is one number, expanded; that of an unused tensor is none; and what has a zero tensor is
known to be zero. None of them costs its bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Compressed", "Decompressed", "Gradients", "compress", "decompress"]

Gradients = Sequence[torch.Tensor | None]
"""Those of a message's tensors; None for a tensor that the loss does not depend on."""


@dataclass(frozen=True, slots=True)
class Decompressed:
    """A tensor that repeats `part` along the dimensions where that has size 1."""

    part: torch.Tensor
    sizes: tuple[int, ...]


Compressed = list[torch.Tensor | Decompressed | None]


def compress(gradients: Gradients) -> Compressed:
    """Takes out what is repeated, as far as the tensors' strides tell. Looks at no elements."""
    return [None if gradient is None else _shrink(gradient) for gradient in gradients]


def decompress(compact: Compressed) -> Gradients:
    """The gradients again; what was repeated still takes no memory."""
    return [each.part.expand(each.sizes) if isinstance(each, Decompressed) else each for each in compact]


def _shrink(gradient: torch.Tensor) -> torch.Tensor | Decompressed:
    if gradient._is_zerotensor():
        zero = torch.zeros((1,) * gradient.dim(), dtype=gradient.dtype, device=gradient.device)
        return Decompressed(zero, tuple(gradient.shape))
    if gradient.layout is not torch.strided or not gradient.numel():
        return gradient
    repeated = [dim for dim, size in enumerate(gradient.shape) if size > 1 and gradient.stride(dim) == 0]
    if not repeated:
        return gradient
    part = gradient
    for dim in repeated:
        part = part.narrow(dim, 0, 1)
    return Decompressed(part, tuple(gradient.shape))
