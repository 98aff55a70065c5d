"""Tensors of one message that share memory: views of another one, such as rows of a matrix or tied weights.

The memory is sent once, and they share it again where they arrive. But not those that gradients flow back through:
there autograd would not know that a change in place of one of them changes others.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch

from ...proto.v1 import agent_pb2
from .strides import can_keep, span

__all__ = ["find_shared", "share"]


def find_shared(tensors: Sequence[torch.Tensor], leaves: AbstractSet[int]) -> Mapping[int, agent_pb2.SharedMemory]:
    """Which of these tensors lie within the memory of which others, by index.

    Only within those that have no gaps, since gaps are not sent, and only on the CPU.

    Args:
        tensors: those of a message.
        leaves: by index those that gradients do not flow back through though they require grad.
    """
    by_memory: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if (not tensor.requires_grad or index in leaves) and _is_plain(tensor) and tensor.numel():
            by_memory.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(index)
    found: dict[int, agent_pb2.SharedMemory] = {}
    for indices in by_memory.values():
        if len(indices) > 1:
            found.update(_find_within({index: tensors[index] for index in indices}))
    return found


def _find_within(tensors: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, agent_pb2.SharedMemory]]:
    """Of the tensors of one storage and dtype."""
    whole = {index for index, tensor in tensors.items() if _has_no_gaps(tensor)}
    owner, begin, end = 0, 0, 0  # of those that begin before the tensor, the one that ends last
    for index, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].storage_offset(), item[0] not in whole, -item[1].numel())
    ):
        first = int(tensor.storage_offset())
        last = first + span(tensor.shape, tensor.stride())
        if last <= end:
            yield index, agent_pb2.SharedMemory(tensor=owner, offset=first - begin)
        elif index in whole:
            owner, begin, end = index, first, last


def share(base: torch.Tensor, message: agent_pb2.Tensor) -> torch.Tensor:
    """The tensor of a message in the memory of another one that has arrived.

    Raises:
        ValueError: it would not lie within that memory.
    """
    sizes, strides, offset = tuple(message.sizes), tuple(message.strides), message.shared.offset
    if (
        len(strides) != len(sizes)
        or min((*sizes, *strides, offset)) < 0
        or not (_is_plain(base) and _has_no_gaps(base))
        or offset + span(sizes, strides) > base.numel()
    ):
        raise ValueError(
            f"malformed tensor: shape {sizes}, strides {strides} at element {offset} of a tensor of {base.numel()}"
        )
    with torch.enable_grad():  # so that autograd sees changes in place, as of any view
        source = base.detach() if base.requires_grad else base
        return source.as_strided(sizes, strides, base.storage_offset() + offset)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    sizes, strides = tensor.shape, tensor.stride()
    return span(sizes, strides) == tensor.numel() and can_keep(sizes, strides)
