"""Tensors as messages: dtype, shape and where the bytes are."""

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

import torch

from ...proto.v1 import agent_pb2
from ...torch_internals import quantized, quantized_per_channel
from ..contracts.devices import NO_DEVICES, DeviceMap
from ..contracts.messages import Buffer
from .shared_tensors import find_shared, share
from .strides import arrange, by_falling_stride, can_keep

__all__ = ["UnmappedDeviceError", "check_sendable", "decode_tensors", "encode_tensors", "make_sendable"]

Put = Callable[[memoryview], agent_pb2.Payload]
Get = Callable[[agent_pb2.Payload], Buffer]

T = TypeVar("T")

_CPU = torch.device("cpu")

_DTYPES: dict[torch.dtype, agent_pb2.DType.ValueType] = {
    getattr(torch, name.lower()): agent_pb2.DType.Value(name)
    for name in agent_pb2.DType.keys()  # noqa: SIM118 - no dictionary
    if hasattr(torch, name.lower())
}
_DTYPES_BACK = {number: dtype for dtype, number in _DTYPES.items()}

_QUANTIZED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""Their integers' dtypes."""

_CARRIERS = _QUANTIZED | {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for dtype, number in _DTYPES.items()
    if agent_pb2.FLOAT4_E2M1FN_X2 <= number <= agent_pb2.UINT7
}
"""What elements are taken for to be copied, where torch cannot copy those of the dtype."""

_SPARSE: dict[torch.layout, agent_pb2.SparseLayout.ValueType] = {
    torch.sparse_coo: agent_pb2.SPARSE_COO,
    torch.sparse_csr: agent_pb2.SPARSE_CSR,
    torch.sparse_csc: agent_pb2.SPARSE_CSC,
    torch.sparse_bsr: agent_pb2.SPARSE_BSR,
    torch.sparse_bsc: agent_pb2.SPARSE_BSC,
}
_SPARSE_BACK = {number: layout for layout, number in _SPARSE.items()}


class UnmappedDeviceError(ValueError):
    """A tensor is on a device that no device map names. Who sends it says what to do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(f"it is a tensor on {device}, and no device map says where it goes")
        self.device = device


def check_sendable(tensor: torch.Tensor, device_map: DeviceMap) -> None:
    """Raises ValueError, saying what to do instead, if this tensor cannot travel."""
    if tensor.is_nested:
        raise ValueError(
            "it is a nested tensor of strided layout, which does not travel: send its tensors, tensor.unbind(), "
            "or make it with layout=torch.jagged"
        )
    if tensor.layout is not torch.strided and tensor.layout not in _SPARSE:
        raise ValueError(
            f"it is a tensor of layout {tensor.layout}, which does not travel: send tensor.to_dense()"
        )
    device = tensor.device.type
    if device == "meta" and tensor.layout is not torch.strided:
        raise ValueError("it is a sparse tensor on meta; of those that have no elements, dense ones travel")
    if device not in ("cpu", "meta") and tensor.device not in device_map:
        raise UnmappedDeviceError(tensor.device)
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"it is a tensor of dtype {tensor.dtype}, which does not travel")
    if tensor.dtype in _QUANTIZED:
        try:
            tensor.qscheme()
        except RuntimeError:
            raise ValueError("it is a quantized tensor without scale and zero point: quantize a tensor") from None


def encode_tensors(
    tensors: Sequence[torch.Tensor],
    put: Put,
    device_map: DeviceMap = NO_DEVICES,
    leaves: AbstractSet[int] = frozenset(),
) -> list[agent_pb2.Tensor]:
    """The messages for the tensors of one envelope.

    Args:
        tensors: all of them, since those that share memory are sent once.
        put: sends bytes on their way, those of a CUDA tensor through the host.
        device_map: where tensors on which devices go.
        leaves: by index those that gradients do not flow back through though they require grad.
    """
    shared = find_shared(tensors, leaves) if len(tensors) > 1 and _CPU not in device_map else {}
    return [
        _head(tensor, shared=shared[index], strides=tensor.stride())
        if index in shared
        else _encode(tensor, put, device_map)
        for index, tensor in enumerate(tensors)
    ]


def _head(
    tensor: torch.Tensor, strides: Sequence[int] = (), shared: agent_pb2.SharedMemory | None = None
) -> agent_pb2.Tensor:
    return agent_pb2.Tensor(
        dtype=_DTYPES[tensor.dtype],
        sizes=tensor.shape,
        strides=strides,
        requires_grad=tensor.requires_grad,
        shared=shared,
    )


def _encode(tensor: torch.Tensor, put: Put, device_map: DeviceMap = NO_DEVICES) -> agent_pb2.Tensor:
    message = _head(tensor)
    if tensor.device.type == "meta":
        message.device = "meta"
        message.strides.extend(tensor.stride())
        return message
    if (target := torch.device(device_map.get(tensor.device, "cpu"))).type != "cpu":
        message.device = str(target)
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        message.layout = _SPARSE[tensor.layout]
        message.coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        message.parts.extend(_encode(part, put) for part in _sparse_parts(tensor))
        return message
    if tensor.is_quantized:
        message.quantization.CopyFrom(_quantization(tensor))
        if tensor.qscheme() is not torch.per_tensor_affine:
            parts = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            message.parts.extend(_encode(part, put) for part in parts)
    if tensor.numel():
        tensor = _carried(tensor)
        if not tensor.is_contiguous() and can_keep(tensor.shape, tensor.stride()):
            message.strides.extend(tensor.stride())
            tensor = tensor.permute(by_falling_stride(tensor.stride()))
        flat = tensor.resolve_conj().resolve_neg().contiguous()
        flat = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride and be contiguous
        message.data.CopyFrom(put(flat.view(torch.uint8).numpy().data))
    return message


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that torch can copy."""
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor
    if not tensor.is_quantized:
        return tensor.view(carrier)
    return torch.empty(0, dtype=carrier).set_(  # int_repr would copy, and lose strides
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _quantization(tensor: torch.Tensor) -> agent_pb2.Quantization:
    if tensor.qscheme() is torch.per_tensor_affine:
        return agent_pb2.Quantization(scale=tensor.q_scale(), zero_point=tensor.q_zero_point())
    return agent_pb2.Quantization(axis=tensor.q_per_channel_axis())


def _sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def make_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that encoding does not copy: this one, or a copy that gradients flow through as well."""
    if tensor.layout is not torch.strided or tensor.dtype in _CARRIERS:
        return tensor
    kept = tensor.is_contiguous() or can_keep(tensor.shape, tensor.stride())
    if kept and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.set_grad_enabled(tensor.requires_grad):
        return tensor.resolve_conj().resolve_neg().contiguous()


def decode_tensors(messages: Iterable[agent_pb2.Tensor], get: Get) -> list[torch.Tensor]:
    """The tensors of an envelope, over memory that nothing else uses, on the devices that the messages name.

    Raises:
        ValueError: a message contradicts itself, or names no device of this worker. Nothing is allocated by its
            word alone.
    """
    messages = list(messages)
    tensors = [None if message.HasField("shared") else _decode(message, get) for message in messages]
    return [
        _decode_shared(message, tensors) if tensor is None else tensor
        for message, tensor in zip(messages, tensors, strict=True)
    ]


def _decode_shared(message: agent_pb2.Tensor, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    index = message.shared.tensor
    base = tensors[index] if index < len(tensors) else None
    if base is None or _DTYPES_BACK.get(message.dtype) != base.dtype:
        raise ValueError(f"malformed tensor: it shares the memory of tensor {index}, which has none of its own")
    tensor = share(base, message)
    return _finish(tensor, message) if message.requires_grad else tensor


def _decode(message: agent_pb2.Tensor, get: Get) -> torch.Tensor:
    dtype = _DTYPES_BACK.get(message.dtype)
    sizes, strides = tuple(message.sizes), tuple(message.strides)
    if dtype is None or any(size < 0 for size in sizes):
        raise ValueError(f"malformed tensor: dtype number {message.dtype}, shape {sizes}")
    if message.device == "meta":
        return _finish(_decode_meta(sizes, strides, dtype), message)
    if message.parts and dtype not in _QUANTIZED:
        tensor = _decode_sparse(message, sizes, get)
    elif not math.prod(sizes):
        tensor = torch.empty(sizes, dtype=_CARRIERS.get(dtype, dtype))
    else:
        data = get(message.data)
        if math.prod(sizes) * dtype.itemsize != len(data):
            raise ValueError(f"malformed tensor: {len(data)} bytes for shape {sizes} of {dtype}")
        writable = bytearray(data) if isinstance(data, bytes) else data
        tensor = arrange(torch.frombuffer(writable, dtype=_CARRIERS.get(dtype, dtype)), sizes, strides)
    if dtype in _QUANTIZED:
        tensor = _decode_quantized(message, tensor, dtype, get)
    elif dtype in _CARRIERS:
        tensor = tensor.view(dtype)
    if message.device:
        tensor = tensor.to(_device_here(message.device))
    return _finish(tensor, message)


def _finish(tensor: torch.Tensor, message: agent_pb2.Tensor) -> torch.Tensor:
    tensor = tensor.detach()  # no view, for autograd: of its changes in place that of a view would come out wrong
    if message.requires_grad and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
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


def _decode_meta(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if any(stride < 0 for stride in strides):
        raise ValueError(f"malformed tensor: strides {strides}")
    try:
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ValueError(f"malformed tensor: {error}") from None


def _decode_sparse(message: agent_pb2.Tensor, sizes: Sequence[int], get: Get) -> torch.Tensor:
    layout = _SPARSE_BACK.get(message.layout)
    expected = 2 if layout is torch.sparse_coo else 3
    if layout is None or len(message.parts) != expected or any(part.parts for part in message.parts):
        raise ValueError(f"malformed sparse tensor: {len(message.parts)} parts, layout number {message.layout}")
    *indices, values = (_decode(part, get) for part in message.parts)
    try:
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                indices[0], values, tuple(sizes), is_coalesced=message.coalesced, check_invariants=True
            )
        return _despite_warning(
            lambda: torch.sparse_compressed_tensor(
                indices[0], indices[1], values, tuple(sizes), layout=layout, check_invariants=True
            )
        )
    except RuntimeError as error:
        raise ValueError(f"malformed sparse tensor: {error}") from None


def _decode_quantized(
    message: agent_pb2.Tensor, integers: torch.Tensor, dtype: torch.dtype, get: Get
) -> torch.Tensor:
    """The tensor with these integers, in their memory."""
    header, sizes = message.quantization, integers.shape
    if not message.parts:
        return _despite_warning(lambda: quantized(integers, dtype, header.scale, header.zero_point))
    axis = header.axis
    if any(part.parts for part in message.parts) or not 0 <= axis < len(sizes):
        raise ValueError(f"malformed quantized tensor: axis {axis} of shape {tuple(sizes)}")
    parts = [_decode(part, get) for part in message.parts]
    if [tuple(part.shape) for part in parts] != [(sizes[axis],)] * 2:
        raise ValueError(f"malformed quantized tensor: not one scale for each of {sizes[axis]} channels")
    return _despite_warning(lambda: quantized_per_channel(integers, dtype, parts[0], parts[1], axis))


def _despite_warning(make: Callable[[], T]) -> T:
    """Returns what `make` does, of which torch warns once.

    Where a program turns warnings into errors its tensors arrive all the same; torch does not warn a second time.
    """
    try:
        return make()
    except Warning:
        return make()
