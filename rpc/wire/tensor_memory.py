"""The memory of tensors: their dtypes, what is sent of their elements, and how the receiver restores them.

Sizes and strides count elements, as in torch. A tensor arrives with its strides, unless that takes much more
memory than its elements. One that repeats its memory, as an expanded one or a window does, is sent as it is in
memory: an element that it has several times is sent once.

Several tensors of one message may share memory, as a matrix and its rows do, or tied weights. The memory is sent
once, and the tensors share it again at the receiver. Tensors through which gradients flow back are sent one by
one: autograd at the receiver would not know that a change in place of one of them changes others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum, auto
from functools import lru_cache

import torch

from ...proto.v1 import agent_pb2

__all__ = [
    "DTYPES_BY_NUMBER",
    "DTYPE_NUMBERS",
    "INTEGER_DTYPES",
    "MAX_DIMENSIONS",
    "MAX_GAP_FACTOR",
    "NUMPY_DTYPES",
    "PLAIN_DTYPES",
    "as_bytes",
    "count_sent",
    "dims_by_descending_stride",
    "find_shared",
    "from_bytes",
    "has_no_gaps",
    "is_shape",
    "make_sendable",
    "restore_shared",
    "span",
    "storage_addresses",
]

DTYPE_NUMBERS: dict[torch.dtype, agent_pb2.DType.ValueType] = {
    getattr(torch, name.lower()): agent_pb2.DType.Value(name)
    for name in agent_pb2.DType.keys()  # noqa: SIM118 - no dictionary
    if hasattr(torch, name.lower())
}
DTYPES_BY_NUMBER = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}

INTEGER_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""Quantized dtypes, and the dtypes of their integers."""

_CARRIER_DTYPES = INTEGER_DTYPES | {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for dtype, number in DTYPE_NUMBERS.items()
    if agent_pb2.FLOAT4_E2M1FN_X2 <= number <= agent_pb2.UINT7
}
"""Dtypes whose tensors torch cannot copy, and dtypes of the same size as which their elements are copied."""

NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)
"""The most frequent dtypes that numpy has too."""

PLAIN_DTYPES = DTYPE_NUMBERS.keys() - _CARRIER_DTYPES.keys()
"""Dtypes whose elements are copied as they are."""

MAX_DIMENSIONS = 64
"""Dimensions of a tensor. torch has operators for no more."""

MAX_GAP_FACTOR = 4
"""A tensor arrives with its strides if it spans at most this many times the memory of its elements."""

MAX_BYTES = 1 << 62
"""Bytes that the elements of a tensor have at most, if repeated ones are counted each time: torch counts them."""

_storage, _address = torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr


# Strides.


class _Memory(Enum):
    """How the elements of a tensor are in memory, apart from its dimensions of stride 0."""

    PLAIN = auto()
    """No two are the same, and gaps are few: sent without the gaps, which the receiver restores."""
    GAPS = auto()
    """No two are the same, and there are many gaps: sent without them, and contiguous at the receiver."""
    WINDOWS = auto()
    """Some are in several places of the tensor: the memory is sent, from the first element to the last."""
    SCATTERED = auto()
    """As WINDOWS, but that memory is more than the elements: sent and received as a contiguous tensor."""


_KEPT = (_Memory.PLAIN, _Memory.WINDOWS)
"""How tensors are that arrive with their strides."""


def is_shape(sizes: Sequence[int]) -> bool:
    """Returns whether these are the sizes of a tensor, if it has the elements that they say."""
    if len(sizes) > MAX_DIMENSIONS or (sizes and min(sizes) < 0):
        return False
    return 0 not in sizes or math.prod(size or 1 for size in sizes[1:]) < 1 << 63  # torch's strides have 64 bits


def dims_by_descending_stride(strides: Sequence[int]) -> list[int]:
    """Returns the dimensions, that of the largest stride first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements of memory there are from the first element to the last, both included."""
    if not math.prod(sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _without_repeats(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Returns the sizes, with 1 for each dimension of stride 0."""
    return [size if stride else 1 for size, stride in zip(sizes, strides, strict=True)]


def _memory_of(sizes: Sequence[int], strides: Sequence[int]) -> _Memory:
    """Returns how a tensor that has elements is in memory. Strides must not be negative."""
    once = _without_repeats(sizes, strides)
    reach = 1
    for dim in reversed(dims_by_descending_stride(strides)):
        if once[dim] > 1:
            if strides[dim] < reach:
                return _Memory.WINDOWS if span(sizes, strides) <= math.prod(sizes) else _Memory.SCATTERED
            reach += (once[dim] - 1) * strides[dim]
    return _Memory.PLAIN if reach <= MAX_GAP_FACTOR * math.prod(once) else _Memory.GAPS


def has_no_gaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a tensor that has elements fills its memory, each element with another one."""
    return span(sizes, strides) == math.prod(sizes) and _memory_of(sizes, strides) is _Memory.PLAIN


@lru_cache(maxsize=1024)
def count_sent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns how many elements are sent of a tensor, which has no strides here if it is contiguous."""
    if not strides or not math.prod(sizes):
        return math.prod(sizes)
    memory = _memory_of(sizes, strides)
    if memory is _Memory.SCATTERED:
        return math.prod(sizes)
    return span(sizes, strides) if memory is _Memory.WINDOWS else math.prod(_without_repeats(sizes, strides))


# Elements as bytes.


def as_bytes(tensor: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]:
    """Returns the elements of a dense tensor, in its own memory where they are in order there.

    The tensor has elements, and no gradient. `from_bytes` restores it.

    Returns:
        The strides that the tensor keeps at the receiver, none if that one is contiguous; and the elements, of
        dtype uint8 and one dimension.
    """
    strides: Sequence[int] = ()
    if tensor.dtype in _CARRIER_DTYPES:
        tensor = _as_carrier(tensor)
    if not tensor.is_contiguous():
        strides, tensor = _in_memory(tensor)
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # contiguous tensors of one element may have any stride
    return strides, flat.view(torch.uint8)


def _in_memory(tensor: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]:
    """Returns the strides that a tensor keeps at the receiver, and the elements that are sent of it."""
    sizes, strides = tensor.shape, tensor.stride()
    memory = _memory_of(sizes, strides)
    if memory is _Memory.SCATTERED:
        return (), tensor
    if memory is _Memory.WINDOWS:
        return strides, tensor.as_strided((span(sizes, strides),), (1,))
    once = tensor.as_strided(_without_repeats(sizes, strides), strides)
    if memory is _Memory.GAPS:
        once = once.contiguous()
        if once.numel() == tensor.numel():
            return (), once
        strides = tuple(kept if stride else 0 for kept, stride in zip(once.stride(), strides, strict=True))
    return strides, once.permute(dims_by_descending_stride(strides))


def _as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that torch can copy, with the memory of one that it cannot."""
    carrier = _CARRIER_DTYPES[tensor.dtype]
    if not tensor.is_quantized:
        return tensor.view(carrier)
    return torch.empty(0, dtype=carrier).set_(  # int_repr would copy, and lose strides
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def from_bytes(
    elements: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Returns the tensor of which `as_bytes` has returned strides and elements; the integers of a quantized one.

    Raises ValueError if no tensor of these strides is sent so, or not by so many elements.
    """
    carrier = _CARRIER_DTYPES.get(dtype, dtype)
    tensor = _restore_strides(elements.view(carrier), sizes, strides)
    return tensor if carrier is dtype or dtype in INTEGER_DTYPES else tensor.view(dtype)


def _restore_strides(flat: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Returns a tensor of these sizes and strides; without strides it is contiguous.

    `flat` is what was sent of its elements, of one dimension: in row-major order; if there are strides, by
    descending stride, the first ones only along dimensions of stride 0; the memory of WINDOWS. The result shares
    its memory unless there are gaps between the elements. Raises ValueError if no tensor of these strides is sent
    so, or not by so many elements.
    """
    if not strides:
        return flat.view(tuple(sizes))
    if (
        len(strides) != len(sizes)
        or min(strides) < 0
        or math.prod(sizes) * flat.itemsize > MAX_BYTES
        or (memory := _memory_of(sizes, strides)) not in _KEPT
        or flat.numel() != count_sent(tuple(sizes), tuple(strides))
    ):
        raise ValueError(f"malformed tensor: strides {tuple(strides)} for shape {tuple(sizes)}")
    if memory is _Memory.WINDOWS:
        return flat.as_strided(tuple(sizes), tuple(strides), flat.storage_offset())
    once, order = _without_repeats(sizes, strides), dims_by_descending_stride(strides)
    tensor = flat.view([once[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
    if any(once[dim] > 1 and tensor.stride(dim) != strides[dim] for dim in order):
        tensor = torch.empty_strided(once, strides, dtype=flat.dtype, device=flat.device).copy_(tensor)
    return tensor.as_strided(tuple(sizes), tuple(strides), tensor.storage_offset())


def make_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that encoding does not copy: the given one, or a copy through which gradients flow back.

    For a tensor that goes to several workers, so that it is copied once at most.
    """
    if tensor.layout is not torch.strided or tensor.dtype in _CARRIER_DTYPES:
        return tensor
    is_kept = tensor.is_contiguous() or _memory_of(tensor.shape, tensor.stride()) in _KEPT
    if is_kept and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    once = tensor
    if not tensor.requires_grad:  # else each element may have a gradient of its own, repeated ones too
        for dim, stride in enumerate(tensor.stride()):
            once = once if stride else once.narrow(dim, 0, 1)
    with torch.set_grad_enabled(tensor.requires_grad):
        return once.resolve_conj().resolve_neg().contiguous().expand(tensor.shape)


# Memory that several tensors share.


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
        return {}
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
