"""What is sent of a dense tensor, on any device: its header, and its elements as bytes."""

from collections.abc import Callable, Sequence

import torch

from ...proto.v1 import agent_pb2
from .dtypes import CARRIER_DTYPES, DTYPE_NUMBERS
from .strides import Memory, dims_by_descending_stride, memory_of, span, without_repeats

__all__ = ["PutPayload", "as_bytes", "as_carrier", "header"]

PutPayload = Callable[[memoryview], agent_pb2.Payload]
"""Sends bytes, and returns where the receiver finds them."""


def header(
    tensor: torch.Tensor, strides: Sequence[int] = (), shared: agent_pb2.SharedMemory | None = None
) -> agent_pb2.Tensor:
    """Returns the message of a tensor, without its elements."""
    return agent_pb2.Tensor(
        dtype=DTYPE_NUMBERS[tensor.dtype],
        sizes=tensor.shape,
        strides=strides,
        requires_grad=tensor.requires_grad,
        shared=shared,
    )


def as_bytes(tensor: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]:
    """Returns the elements of a dense tensor, in its own memory where they are in order there.

    Args:
        tensor: a tensor without gradient, of a dtype that torch can copy, which has elements.

    Returns:
        The strides that the tensor keeps at the receiver, none if that one is contiguous; and the elements, of
        dtype uint8 and one dimension.
    """
    strides: Sequence[int] = ()
    if not tensor.is_contiguous():
        strides, tensor = _in_memory(tensor)
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # contiguous tensors of one element may have any stride
    return strides, flat.view(torch.uint8)


def _in_memory(tensor: torch.Tensor) -> tuple[Sequence[int], torch.Tensor]:
    """Returns the strides that a tensor keeps at the receiver, and the elements that are sent of it."""
    sizes, strides = tensor.shape, tensor.stride()
    memory = memory_of(sizes, strides)
    if memory is Memory.SCATTERED:
        return (), tensor
    if memory is Memory.WINDOWS:
        return strides, tensor.as_strided((span(sizes, strides),), (1,))
    once = tensor.as_strided(without_repeats(sizes, strides), strides)
    if memory is Memory.GAPS:
        once = once.contiguous()
        if once.numel() == tensor.numel():
            return (), once
        strides = tuple(kept if stride else 0 for kept, stride in zip(once.stride(), strides, strict=True))
    return strides, once.permute(dims_by_descending_stride(strides))


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that torch can copy, with the memory of the given one."""
    carrier = CARRIER_DTYPES.get(tensor.dtype)
    if carrier is None:
        return tensor
    if not tensor.is_quantized:
        return tensor.view(carrier)
    return torch.empty(0, dtype=carrier).set_(  # int_repr would copy, and lose strides
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
