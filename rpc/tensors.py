"""Tensors as messages: dtype, shape and where the bytes are."""

import math
from collections.abc import Callable

import torch

from ..proto.v1 import agent_pb2

__all__ = ["Buffer", "check_sendable", "decode_tensor", "encode_tensor"]

Buffer = bytes | memoryview

_DTYPES: dict[torch.dtype, agent_pb2.DType.ValueType] = {
    getattr(torch, name.lower()): agent_pb2.DType.Value(name)
    for name in agent_pb2.DType.keys()  # noqa: SIM118 - no dictionary
    if hasattr(torch, name.lower())
}
_DTYPES_BACK = {number: dtype for dtype, number in _DTYPES.items()}


def check_sendable(tensor: torch.Tensor) -> None:
    """Raises ValueError, saying what to do instead, if this tensor cannot travel."""
    if tensor.device.type != "cpu":
        raise ValueError(f"it is a tensor on {tensor.device}; only CPU tensors travel: send tensor.cpu()")
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_nested:
        raise ValueError(f"it is a tensor of layout {tensor.layout}; dense and sparse COO tensors travel")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"it is a tensor of dtype {tensor.dtype}, which does not travel")


def encode_tensor(tensor: torch.Tensor, put: Callable[[memoryview], agent_pb2.Payload]) -> agent_pb2.Tensor:
    """The message for a CPU tensor, whose bytes `put` sends on their way."""
    message = agent_pb2.Tensor(dtype=_DTYPES[tensor.dtype], sizes=tensor.shape, requires_grad=tensor.requires_grad)
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        message.coalesced = tensor.is_coalesced()
        parts = (tensor._indices(), tensor._values())
        message.coo.extend(encode_tensor(part, put) for part in parts)
    elif tensor.numel():
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        message.data.CopyFrom(put(flat.view(torch.uint8).numpy().data))
    return message


def decode_tensor(message: agent_pb2.Tensor, get: Callable[[agent_pb2.Payload], Buffer]) -> torch.Tensor:
    """The tensor of a message, over memory that nothing else uses.

    Raises:
        ValueError: the message contradicts itself. Nothing is allocated by its word alone.
    """
    dtype = _DTYPES_BACK.get(message.dtype)
    sizes = tuple(message.sizes)
    if dtype is None or any(size < 0 for size in sizes):
        raise ValueError(f"malformed tensor: dtype number {message.dtype}, shape {sizes}")
    if message.coo:
        tensor = _decode_coo(message, sizes, get)
    elif not math.prod(sizes):
        tensor = torch.empty(sizes, dtype=dtype)
    else:
        data = get(message.data)
        if math.prod(sizes) * dtype.itemsize != len(data):
            raise ValueError(f"malformed tensor: {len(data)} bytes for shape {sizes} of {dtype}")
        writable = bytearray(data) if isinstance(data, bytes) else data
        tensor = torch.frombuffer(writable, dtype=dtype).view(sizes)
    if message.requires_grad and (dtype.is_floating_point or dtype.is_complex):
        tensor.requires_grad_()
    return tensor


def _decode_coo(
    message: agent_pb2.Tensor, sizes: tuple[int, ...], get: Callable[[agent_pb2.Payload], Buffer]
) -> torch.Tensor:
    if len(message.coo) != 2 or any(part.coo for part in message.coo):
        raise ValueError("malformed sparse tensor: it has no indices and values")
    indices, values = (decode_tensor(part, get) for part in message.coo)
    try:
        return torch.sparse_coo_tensor(
            indices, values, sizes, is_coalesced=message.coalesced, check_invariants=True
        )
    except RuntimeError as error:
        raise ValueError(f"malformed sparse tensor: {error}") from None
