"""The memory of tensors: what engines get in place of users' tensors, and how they copy the bytes of those.

Outputs that engines cannot write directly are copied back at the end.
"""

import ctypes
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from ...torch_internals import neg_view

__all__ = ["Span", "Staging", "as_bytes", "flat", "join_bytes", "memmove", "span_of", "split_bytes"]


class Span(NamedTuple):
    """A range of addresses."""

    start: int
    stop: int


def span_of(tensor: Tensor, part: int = 0, parts: int = 1) -> Span:
    """Returns the memory of a contiguous tensor, or of one of its equal parts."""
    size = tensor.nbytes // parts
    start = tensor.data_ptr() + part * size
    return Span(start, start + size)


@final
class Staging:
    """The tensors of one operation, as the engine sees them.

    An engine gets dense, contiguous aliases outside autograd; or copies, where the user's tensor is not
    contiguous, or shares memory with another tensor of the operation in a way that engines need not support. So
    all inputs have the values from before the operation, and outputs that share memory have those of the last of
    them. All outputs are staged before the first input.

    Raises:
        TypeError: a tensor has no memory of its own, so there is nothing to read or write.
        ValueError: several elements of an output tensor share memory.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._written: list[Span] = []  # the memory of users' tensors that the engine writes to; sorted, disjoint

    def input(
        self, tensor: Tensor, in_place: Span | None = None, own_part: tuple[int, int] | None = None
    ) -> Tensor:
        """Returns what the engine reads in place of `tensor`.

        Args:
            tensor: the user's.
            in_place: memory that the engine may both write as an output and read as a part of this tensor.
            own_part: says the same of a part of the tensor itself: its index, and the number of equal parts.
        """
        alias = _alias(tensor)
        if not _is_plain(alias):
            return _plain_copy(alias)
        overlaps = self._overlaps(span_of(alias))
        if overlaps and overlaps != [span_of(alias, *own_part) if own_part else in_place]:
            return _plain_copy(alias)
        return alias

    def output(self, tensor: Tensor) -> Tensor:
        """Returns what the engine reads and writes in place of `tensor`."""
        alias = _alias(tensor)
        if _is_plain(alias):
            span = span_of(alias)
            if not self._overlaps(span):
                if 0 < span.start < span.stop:
                    insort(self._written, span)
                return alias
        elif any(size > 1 and stride == 0 for size, stride in zip(alias.shape, alias.stride(), strict=True)):
            raise ValueError(
                f"a tensor of shape {tuple(alias.shape)} and strides {alias.stride()} cannot be written to, "
                "because several of its elements share memory: clone() it"
            )
        copy = _plain_copy(alias)
        self._copies.append((alias, copy))
        return copy

    def inputs(self, tensors: Sequence[Tensor], own: int = -1, in_place: Span | None = None) -> list[Tensor]:
        """Returns `input` of each tensor; `in_place` is for the tensor with index `own`."""
        return [self.input(tensor, in_place if i == own else None) for i, tensor in enumerate(tensors)]

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

    def _overlaps(self, span: Span) -> list[Span]:
        """Returns the parts of `span` that the engine writes to."""
        written = self._written
        if not 0 < span.start < span.stop:  # an empty tensor, or one without memory, such as a meta tensor
            return []
        first = bisect_right(written, span)
        if first and written[first - 1].stop > span.start:
            first -= 1
        found = []
        while first < len(written) and written[first].start < span.stop:
            found.append(Span(max(written[first].start, span.start), min(written[first].stop, span.stop)))
            first += 1
        return found


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
    with torch.inference_mode(mode=False):
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


memmove = ctypes.memmove
"""C's memmove: destination address, source address, number of bytes. For a few KiB torch takes longer."""


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
