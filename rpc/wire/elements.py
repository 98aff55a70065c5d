"""What is sent of a dense tensor, on any device: its header, and its elements as bytes."""

from collections.abc import Callable, Sequence

import torch

from ...proto.v1 import agent_pb2
from .dtypes import CARRIER_DTYPES, DTYPE_NUMBERS
from .strides import can_keep_strides, dims_by_descending_stride

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
        tensor: a tensor without gradient, of a dtype that torch can copy.

    Returns:
        The strides that the tensor keeps at the receiver, none if that one is contiguous; and the elements, of
        dtype uint8 and one dimension.
    """
    strides: Sequence[int] = ()
    if not tensor.is_contiguous() and can_keep_strides(tensor.shape, tensor.stride()):
        strides = tensor.stride()
        tensor = tensor.permute(dims_by_descending_stride(strides))
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # contiguous tensors of one element may have any stride
    return strides, flat.view(torch.uint8)


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
