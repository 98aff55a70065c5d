"""Brings tensors into the shape that engines take, and what the engines wrote back to where users want it."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

__all__ = ["Staging"]


@final
class Staging:
    """The tensors of one operation.

    Engines get dense, contiguous aliases outside autograd, or copies where users' tensors are not contiguous.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """What the engine reads instead of `tensor`."""
        # .data, not detach(): what an engine writes does not count as a change in place, as with torch's own
        # groups, and DDP relies on that for buffers that are part of a graph.
        return tensor.data if _is_plain(tensor) else _plain(tensor.data)

    def output(self, tensor: Tensor) -> Tensor:
        """What the engine reads and writes instead of `tensor`."""
        alias = tensor.data
        if _is_plain(alias):
            return alias
        copy = _plain(alias)
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


def _is_plain(tensor: Tensor) -> bool:
    """Are its bytes its numbers, one after another? Those of x.conj() and x.conj().imag are not: they are x's."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: Tensor) -> Tensor:
    """A copy that is."""
    return tensor.resolve_conj().resolve_neg().contiguous()
