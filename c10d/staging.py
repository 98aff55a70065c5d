"""Brings tensors into the shape that engines take, and what the engines wrote back to where users want it."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from ..torch_internals import neg_view

__all__ = ["Staging"]


@final
class Staging:
    """The tensors of one operation.

    Engines get dense, contiguous aliases outside autograd, or copies where users' tensors are not contiguous.

    Raises:
        TypeError: a tensor has no memory of its own, so that there is nothing to read or write.
        ValueError: several elements of a tensor that is written to share memory.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """What the engine reads instead of `tensor`."""
        alias = _alias(tensor)
        return alias if _is_plain(alias) else _plain_copy(alias)

    def output(self, tensor: Tensor) -> Tensor:
        """What the engine reads and writes instead of `tensor`."""
        alias = _alias(tensor)
        if _is_plain(alias):
            return alias
        if any(size > 1 and stride == 0 for size, stride in zip(alias.shape, alias.stride(), strict=True)):
            raise ValueError(
                f"a tensor of shape {tuple(alias.shape)} and strides {alias.stride()} cannot be written to, for "
                "several of its elements share memory: clone() it"
            )
        copy = _plain_copy(alias)
        self._copies.append((alias, copy))
        return copy

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`input` of each."""
        return [self.input(tensor) for tensor in tensors]

    def outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`output` of each."""
        return [self.output(tensor) for tensor in tensors]

    def needs_finish(self) -> bool:
        """Is there anything to write back?"""
        return bool(self._copies)

    def finish(self) -> None:
        """Writes back what the engine wrote to copies."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory outside autograd, which any thread may write to."""
    if type(tensor) is not Tensor and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()  # what a functional collective returns: a tensor that is not there yet
    # .data, not detach(): what an engine writes does not count as a change in place, as with torch's own
    # groups, and DDP relies on that for buffers that are part of a graph.
    alias = _normal(tensor) if tensor.is_inference() else tensor.data
    if not alias.data_ptr() and alias.numel() and not alias.is_meta:  # which an engine may be for
        raise TypeError(
            f"a {type(tensor).__name__} on {tensor.device} that has no memory of its own cannot be communicated: "
            "give a plain tensor, such as DTensor.to_local()"
        )
    return alias


def _normal(tensor: Tensor) -> Tensor:
    """An inference tensor's memory as one that may be written to outside inference mode, as other threads are."""
    with torch.inference_mode(mode=False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            alias = alias.conj()
        return neg_view(alias) if tensor.is_neg() else alias


def _is_plain(tensor: Tensor) -> bool:
    """Are its bytes its numbers, one after another? Those of x.conj() and x.conj().imag are not: they are x's."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    # A tensor of one number is contiguous with any strides, as in the gradients of sum(), but has no bytes then.
    return not tensor.dim() or tensor.stride(-1) == 1


def _plain_copy(tensor: Tensor) -> Tensor:
    """A copy that is."""
    with torch.inference_mode(mode=False):
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
