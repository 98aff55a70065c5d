"""Prepares users' tensors for engines, and copies results back into tensors that engines cannot write directly."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..torch_internals import neg_view

__all__ = ["Staging"]


@final
class Staging:
    """The tensors of one operation, as the engine sees them.

    An engine gets dense, contiguous aliases outside autograd; or copies, where the user's tensor is not
    contiguous.

    Raises:
        TypeError: a tensor has no memory of its own, so there is nothing to read or write.
        ValueError: several elements of an output tensor share memory.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """Returns what the engine reads in place of `tensor`."""
        alias = _alias(tensor)
        return alias if _is_plain(alias) else _plain_copy(alias)

    def output(self, tensor: Tensor) -> Tensor:
        """Returns what the engine reads and writes in place of `tensor`."""
        alias = _alias(tensor)
        if _is_plain(alias):
            return alias
        if any(size > 1 and stride == 0 for size, stride in zip(alias.shape, alias.stride(), strict=True)):
            raise ValueError(
                f"a tensor of shape {tuple(alias.shape)} and strides {alias.stride()} cannot be written to, "
                "because several of its elements share memory: clone() it"
            )
        copy = _plain_copy(alias)
        self._copies.append((alias, copy))
        return copy

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns `input` of each tensor."""
        return [self.input(tensor) for tensor in tensors]

    def outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns `output` of each tensor."""
        return [self.output(tensor) for tensor in tensors]

    def needs_copy_back(self) -> bool:
        """Returns whether the engine writes to copies, which `copy_back` must copy into the user's tensors."""
        return bool(self._copies)

    def copy_back(self) -> None:
        """Copies what the engine wrote to copies into the user's tensors."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor on the same memory, outside autograd, that any thread may write to."""
    if type(tensor) is not Tensor and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()  # the result of a functional collective, which may not have arrived yet
    # .data, not detach(): a write by an engine must not count as an in-place change, as with torch's own groups.
    # DDP relies on that for buffers that are part of a graph.
    alias = _normal(tensor) if tensor.is_inference() else tensor.data
    if not alias.data_ptr() and alias.numel() and not alias.is_meta:  # an engine may support meta tensors
        raise TypeError(
            f"a {type(tensor).__name__} on {tensor.device} that has no memory of its own cannot be communicated: "
            "give a plain tensor, such as DTensor.to_local()"
        )
    return alias


def _normal(tensor: Tensor) -> Tensor:
    """Returns an inference tensor's memory as a normal tensor, which threads outside inference mode may write."""
    with torch.inference_mode(mode=False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            alias = alias.conj()
        return neg_view(alias) if tensor.is_neg() else alias


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether the tensor's memory holds its elements one after another.

    The memory of `x.conj()` and `x.conj().imag` does not: it holds the elements of `x`.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    # A tensor of one element is contiguous with any strides, as gradients of sum() are; torch's view(dtype) then
    # fails unless the last stride is 1.
    return not tensor.dim() or tensor.stride(-1) == 1


def _plain_copy(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy with conjugation and negation resolved."""
    with torch.inference_mode(mode=False):
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
