"""Tensors of one message that share memory, such as a matrix and its rows, or tied weights.

The memory is sent once, and the tensors share it again at the receiver. Tensors through which gradients flow back
are sent one by one: autograd at the receiver would not know that a change in place of one of them changes others.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress

import torch

from ...proto.v1 import agent_pb2
from .strides import MAX_DIMENSIONS, has_no_gaps, span

__all__ = ["find_shared", "restore_shared", "storage_addresses"]

_NONE: Mapping[int, agent_pb2.SharedMemory] = {}

_storage, _address = torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr


def storage_addresses(tensors: Sequence[torch.Tensor]) -> AbstractSet[int]:
    """Returns the addresses of the storages of tensors, without those that have none, as sparse ones."""
    try:
        return set(map(_address, map(_storage, tensors)))
    except RuntimeError:  # of a tensor without a storage
        addresses = set()
        for tensor in tensors:
            with suppress(RuntimeError):
                addresses.add(tensor.untyped_storage().data_ptr())
        return addresses


def find_shared(tensors: Sequence[torch.Tensor], leaves: AbstractSet[int]) -> Mapping[int, agent_pb2.SharedMemory]:
    """Returns which tensors of a message lie within the memory of another one, by index, and where in it.

    The other one is a CPU tensor of the same dtype without gaps between its elements, since gaps are not sent.
    `leaves` are the indices of tensors that require grad but arrive as autograd leaves.
    """
    if len(storage_addresses(tensors)) == len(tensors):  # the way of nearly all messages
        return _NONE
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
    """Does what `find_shared` does, for tensors of one storage and dtype."""
    dense = {index for index, tensor in tensors.items() if _has_no_gaps(tensor)}
    owner, begin, end = 0, 0, 0  # of those that begin before the tensor, the one that ends last
    for index, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].storage_offset(), item[0] not in dense, -item[1].numel())
    ):
        first = int(tensor.storage_offset())
        last = first + span(tensor.shape, tensor.stride())
        if last <= end:
            yield index, agent_pb2.SharedMemory(tensor=owner, offset=first - begin)
        elif index in dense:
            owner, begin, end = index, first, last


def restore_shared(base: torch.Tensor, message: agent_pb2.Tensor) -> torch.Tensor:
    """Returns the tensor of a message that has `shared` as a view of the tensor whose memory it shares.

    Raises ValueError if it would not lie within the memory of `base`.
    """
    sizes, strides = tuple(message.sizes[: MAX_DIMENSIONS + 1]), tuple(message.strides[: MAX_DIMENSIONS + 1])
    offset = message.shared.offset
    if (
        len(strides) != len(sizes)
        or len(sizes) > MAX_DIMENSIONS
        or min((*sizes, *strides, offset)) < 0
        or not (_is_plain(base) and _has_no_gaps(base))
        or offset + span(sizes, strides) > base.numel()
    ):
        raise ValueError(
            f"malformed tensor: shape {sizes}, strides {strides} at element {offset} of a tensor of {base.numel()}"
        )
    with torch.enable_grad():  # so that autograd records changes in place, as of any view
        source = base.detach() if base.requires_grad else base
        return source.as_strided(sizes, strides, base.storage_offset() + offset)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or has_no_gaps(tensor.shape, tensor.stride())
