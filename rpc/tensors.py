"""Tensors as messages: dtype, shape and where the bytes are."""

import math
from collections.abc import Callable, Sequence

import torch

from ..proto.v1 import agent_pb2
from .device_maps import NO_DEVICES, DeviceMap

__all__ = ["Buffer", "check_sendable", "decode_tensor", "encode_tensor", "laid_out"]

Buffer = bytes | memoryview

_DTYPES: dict[torch.dtype, agent_pb2.DType.ValueType] = {
    getattr(torch, name.lower()): agent_pb2.DType.Value(name)
    for name in agent_pb2.DType.keys()  # noqa: SIM118 - no dictionary
    if hasattr(torch, name.lower())
}
_DTYPES_BACK = {number: dtype for dtype, number in _DTYPES.items()}


def check_sendable(tensor: torch.Tensor, device_map: DeviceMap) -> None:
    """Raises ValueError, saying what to do instead, if this tensor cannot travel."""
    if tensor.device.type != "cpu" and tensor.device not in device_map:
        raise ValueError(
            f"it is a tensor on {tensor.device}, and no device map says where it goes: send tensor.cpu(), or call "
            "set_device_map on the options before init_rpc"
        )
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_nested:
        raise ValueError(f"it is a tensor of layout {tensor.layout}; dense and sparse COO tensors travel")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"it is a tensor of dtype {tensor.dtype}, which does not travel")


def encode_tensor(
    tensor: torch.Tensor, put: Callable[[memoryview], agent_pb2.Payload], device_map: DeviceMap = NO_DEVICES
) -> agent_pb2.Tensor:
    """The message for a tensor, whose bytes `put` sends on their way, those of a CUDA tensor through the host."""
    message = agent_pb2.Tensor(dtype=_DTYPES[tensor.dtype], sizes=tensor.shape, requires_grad=tensor.requires_grad)
    if (target := torch.device(device_map.get(tensor.device, "cpu"))).type != "cpu":
        message.device = str(target)
    tensor = tensor.detach().cpu()
    if tensor.layout is torch.sparse_coo:
        message.coalesced = tensor.is_coalesced()
        parts = (tensor._indices(), tensor._values())
        message.coo.extend(encode_tensor(part, put) for part in parts)
    elif tensor.numel():
        if not tensor.is_contiguous() and _can_keep(tensor.shape, tensor.stride()):
            message.strides.extend(tensor.stride())
            tensor = tensor.permute(_by_falling_stride(tensor.stride()))
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride and be contiguous
        message.data.CopyFrom(put(flat.view(torch.uint8).numpy().data))
    return message


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that `encode_tensor` does not copy: this one, or a copy that gradients flow through as well."""
    kept = tensor.is_contiguous() or _can_keep(tensor.shape, tensor.stride())
    if tensor.layout is not torch.strided or (kept and not tensor.is_conj() and not tensor.is_neg()):
        return tensor
    with torch.set_grad_enabled(tensor.requires_grad):
        return tensor.resolve_conj().resolve_neg().contiguous()


def decode_tensor(message: agent_pb2.Tensor, get: Callable[[agent_pb2.Payload], Buffer]) -> torch.Tensor:
    """The tensor of a message, over memory that nothing else uses, on the device that the message names.

    Raises:
        ValueError: the message contradicts itself, or names no device of this worker. Nothing is allocated by
            its word alone.
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
        tensor = _arrange(torch.frombuffer(writable, dtype=dtype), sizes, tuple(message.strides))
    if message.device:
        tensor = tensor.to(_device_here(message.device))
    tensor = tensor.detach()  # no view, for autograd: of its changes in place that of a view would come out wrong
    if message.requires_grad and (dtype.is_floating_point or dtype.is_complex):
        tensor.requires_grad_()
    return tensor


def _device_here(name: str) -> torch.device:
    """A device that another worker's device map names."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"malformed tensor: no device is called {name!r}") from None
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"a tensor is to go to {device}, but there are {torch.cuda.device_count()} CUDA devices here"
        )
    return device


MOST_GAPS = 4
"""A tensor arrives with its strides if it spans at most this many times the memory of its elements."""


def _by_falling_stride(strides: Sequence[int]) -> list[int]:
    """The dimensions, that of the largest stride first."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def _can_keep(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Can a tensor of these sizes be laid out with these strides: no two elements at one place, few gaps?"""
    if len(strides) != len(sizes):
        return False
    span = 1
    for dim in reversed(_by_falling_stride(strides)):
        if sizes[dim] > 1:
            if strides[dim] < span:
                return False
            span += (sizes[dim] - 1) * strides[dim]
    return span <= MOST_GAPS * math.prod(sizes)


def _arrange(flat: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The elements as a tensor of these sizes, and strides if there are any."""
    if not strides:
        return flat.view(sizes)
    if not _can_keep(sizes, strides):
        raise ValueError(f"malformed tensor: strides {strides} for shape {sizes}")
    order = _by_falling_stride(strides)
    tensor = flat.view([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(sizes, strides, dtype=flat.dtype).copy_(tensor)


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
