"""Gradients in the form in which they are sent between workers.

The gradient of `x.sum()` is one number, expanded; that of an unused tensor is None; that of torch's zero tensors
is known to be zero. None of these is sent element by element.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Compressed", "Repeated", "TensorGradients", "compress", "decompress"]

TensorGradients = Sequence[torch.Tensor | None]
"""The gradients of the tensors of one message; None for a tensor that the loss does not depend on."""


class Repeated(NamedTuple):
    """A tensor that repeats `part` along each dimension in which `part` has size 1 and the tensor has not."""

    part: torch.Tensor
    sizes: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.part.device


Compressed = list[torch.Tensor | Repeated | None]


def compress(gradients: TensorGradients) -> Compressed:
    """Returns gradients without repeated elements. Looks at strides only, at no elements."""
    return [None if gradient is None else _without_repeats(gradient) for gradient in gradients]


def decompress(compressed: Compressed) -> TensorGradients:
    """Returns the gradients again, repeated elements as expanded tensors, which take no memory."""
    return [each.part.expand(each.sizes) if isinstance(each, Repeated) else each for each in compressed]


def _without_repeats(gradient: torch.Tensor) -> torch.Tensor | Repeated:
    if gradient._is_zerotensor():
        zero = torch.zeros((1,) * gradient.dim(), dtype=gradient.dtype, device=gradient.device)
        return Repeated(zero, tuple(gradient.shape))
    if gradient.layout is not torch.strided or not gradient.numel():
        return gradient
    repeated = [dim for dim, size in enumerate(gradient.shape) if size > 1 and gradient.stride(dim) == 0]
    if not repeated:
        return gradient
    part = gradient
    for dim in repeated:
        part = part.narrow(dim, 0, 1)
    return Repeated(part, tuple(gradient.shape))
