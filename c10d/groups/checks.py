"""Checks of the arguments of collectives, on the rank that gives them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.reductions import Reduction

__all__ = [
    "check_coalesced",
    "check_equal_sizes",
    "check_parts",
    "check_rank",
    "check_reduction",
    "check_same_size",
    "check_tag",
    "check_tensors",
    "check_whole",
    "single_item",
]


def single_item(name: str, tensors: Any) -> Any:
    """Returns the only item of a list, in which torch passes the tensor (or list of tensors) of a rank."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{name} takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


def check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    """Checks that there are tensors, and that they are dense, of one dtype and on one device."""
    if not tensors:
        raise ValueError(f"{name} needs at least one tensor")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} takes tensors, not a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} takes dense tensors, not {tensor.layout}: call to_dense() first")
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"{name} takes tensors of one dtype on one device, but got {first.dtype} on {first.device} and "
                f"{tensor.dtype} on {tensor.device}"
            )


def check_reduction(name: str, reduction: Reduction, tensors: Sequence[Tensor]) -> None:
    """Checks that the reduction supports the dtype of the tensors."""
    reason = reduction.unsupported_reason(tensors[0].dtype)
    if reason:
        raise ValueError(f"{name} cannot use {reduction.name} on {tensors[0].dtype}: {reason}")


def check_rank(name: str, what: str, rank: object, size: int) -> None:
    """Checks that `rank`, the argument called `what`, is a rank of a group of `size` ranks."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < size:
        raise ValueError(f"{name}: {what} is {rank!r}, but the group has the ranks 0 to {size - 1}")


def check_tag(name: str, tag: int) -> None:
    """Checks the tag of a message."""
    if tag < 0:
        raise ValueError(f"{name}: the tag is {tag}: give 0 or more")


def check_parts(name: str, what: str, parts: Sequence[Any], size: int) -> None:
    """Checks that there is one part for each of `size` ranks."""
    if len(parts) != size:
        raise ValueError(f"{name} takes one of its {what} for each of the {size} ranks, but got {len(parts)}")


def check_same_size(name: str, output: Tensor, tensor: Tensor) -> None:
    """Checks that the output for a rank's own input has as many elements as that input."""
    if output.numel() != tensor.numel():
        raise ValueError(
            f"{name}: the output for this rank's own input has {output.numel()} elements, the input "
            f"{tensor.numel()}"
        )


def check_equal_sizes(name: str, what: str, parts: Sequence[Tensor], tensor: Tensor) -> None:
    """Checks that the root's parts, one for each rank, have as many elements as its own tensor."""
    for rank, part in enumerate(parts):
        if part.numel() != tensor.numel():
            raise ValueError(
                f"{name} takes {what} of one size, but that of rank {rank} has {part.numel()} elements and the "
                f"root's own {tensor.numel()}: use all_to_all for tensors of different sizes"
            )


def check_coalesced(name: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Checks that there is one output for each input."""
    if len(outputs) != len(inputs):
        raise ValueError(f"{name} takes one output for each of the {len(inputs)} inputs, but got {len(outputs)}")


def check_whole(name: str, big: str, whole: Tensor, small: str, part: Tensor, size: int) -> None:
    """Checks that the tensor called `big` has `size` times as many elements as the one called `small`."""
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"{name}: the {big} must have {size} times the elements of the {small}, but they have "
            f"{whole.numel()} and {part.numel()}"
        )
