"""Gradients in the form in which they are sent between workers.

The gradient of `x.sum()` is one number, expanded; that of an unused tensor is None; that of torch's zero tensors
is known to be zero. None of these is sent element by element, unless it is small. A gradient that belongs to
several tensors, as that of a sum does, is sent once.
"""

from collections.abc import Sequence

import torch

__all__ = ["Compressed", "TensorGradients", "compress", "decompress", "is_on_cpu"]

SMALL_BYTES = 1 << 10
"""Bytes of a gradient that is sent element by element: to leave out repeated ones would take longer."""

TensorGradients = Sequence[torch.Tensor | None]
"""The gradients of the tensors of one message; None for a tensor that the loss does not depend on."""

Repeated = tuple[torch.Tensor, tuple[int, ...]]
"""A part of a tensor, and the sizes of the tensor: it repeats the part along each dimension in which the part has
size 1 and the tensor has not."""

Compressed = list[torch.Tensor | Repeated | None]


def compress(gradients: TensorGradients) -> Compressed:
    """Returns gradients without repeated elements. Looks at strides only, at no elements."""
    compressed: Compressed = []
    last: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is None:
            compressed.append(None)
        elif gradient is last:
            compressed.append(compressed[-1])  # the same object, which is pickled once
        else:
            compressed.append(_without_repeats(gradient))
        last = gradient
    return compressed


def decompress(compressed: Compressed) -> TensorGradients:
    """Returns the gradients again, repeated elements as expanded tensors, which take no memory.

    The list is emptied: whoever else has it shall not keep the gradients, which may then be used without a copy.
    """
    received = [*compressed]
    compressed.clear()
    for index, each in enumerate(received):
        if isinstance(each, tuple):
            received[index] = each[0].expand(each[1])
    return received  # type: ignore[return-value] # there are no tuples any more


def is_on_cpu(compressed: Compressed) -> bool:
    """Returns whether all gradients are on the CPU."""
    for each in compressed:
        if each is not None and not (each[0] if isinstance(each, tuple) else each).is_cpu:
            return False
    return True


def _without_repeats(gradient: torch.Tensor) -> torch.Tensor | Repeated:
    if gradient._is_zerotensor():
        zero = torch.zeros((1,) * gradient.dim(), dtype=gradient.dtype, device=gradient.device)
        return zero, tuple(gradient.shape)
    if gradient.layout is not torch.strided or gradient.is_contiguous() or not gradient.numel():
        return gradient
    repeated = [dim for dim, size in enumerate(gradient.shape) if size > 1 and gradient.stride(dim) == 0]
    if not repeated:
        return gradient
    if gradient.nbytes <= SMALL_BYTES:
        return gradient.contiguous()
    part = gradient
    for dim in repeated:
        part = part.narrow(dim, 0, 1)
    return part, tuple(gradient.shape)
