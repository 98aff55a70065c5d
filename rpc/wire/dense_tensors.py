"""What is sent of a dense tensor, on any device; and those on CUDA devices as protobuf messages, and back.

Elements on devices go by way of device memory where the channels can do that, else by way of the host. All copies
of a message are started before the first one is waited for.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ...proto.v1 import agent_pb2
from ..contracts.device_payloads import DeviceBuffer, DeviceReader, DeviceWriter, StartedCopy
from ..contracts.devices import DeviceMap
from ..contracts.messages import Buffer
from .dtypes import CARRIER_DTYPES, DTYPE_NUMBERS
from .strides import Memory, dims_by_descending_stride, memory_of, restore_strides, span, without_repeats

__all__ = [
    "PutPayload",
    "as_bytes",
    "as_carrier",
    "check_count",
    "decode_on_device",
    "encode_from_devices",
    "header",
    "local_device",
]

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

    The tensor has elements, of a dtype that torch can copy, and no gradient.

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


def encode_from_devices(
    tensors: Sequence[torch.Tensor], put: PutPayload, device_map: DeviceMap, writer: DeviceWriter
) -> Mapping[int, agent_pb2.Tensor]:
    """Returns the messages for those tensors of one envelope that are dense and on CUDA devices, by index.

    `put` sends elements that are in the memory of the host, and the writer those on devices.
    """
    messages: dict[int, agent_pb2.Tensor] = {}
    by_devices: dict[tuple[torch.device, torch.device], list[tuple[agent_pb2.Tensor, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if not tensor.is_cuda or tensor.layout is not torch.strided or tensor.is_quantized:
            continue
        target = torch.device(device_map.get(tensor.device, "cpu"))
        message = messages[index] = header(tensor)
        if target.type != "cpu":
            message.device = str(target)
        if not tensor.numel():
            continue
        strides, elements = as_bytes(as_carrier(tensor.detach()))
        message.strides.extend(strides)
        by_devices.setdefault((tensor.device, target), []).append((message, elements))
    staged: list[tuple[agent_pb2.Tensor, torch.Tensor]] = []
    for (_, target), together in by_devices.items():
        payloads = None
        if target.type == "cuda":
            payloads = writer.put_on_device([elements for _, elements in together], target)
        if payloads is None:
            staged.extend(together)
        else:
            for (message, _), payload in zip(together, payloads, strict=True):
                message.data.CopyFrom(payload)
    if staged:
        on_host = writer.to_host([elements for _, elements in staged])
        for (message, _), elements in zip(staged, on_host, strict=True):
            message.data.CopyFrom(put(elements.numpy().data))
    return messages


def decode_on_device(
    message: agent_pb2.Tensor,
    sizes: Sequence[int],
    dtype: torch.dtype,
    data: Buffer | DeviceBuffer,
    devices: DeviceReader,
    started: list[StartedCopy],
) -> torch.Tensor:
    """Returns the dense tensor of a message on the device that the message names, when its copy is complete.

    `data` are its elements, of which there are some. The copy is added to `started`. Raises ValueError if the
    message contradicts itself, or names a device that this worker does not have.
    """
    device = local_device(message.device)
    check_count(message, sizes, dtype, len(data))
    if isinstance(data, bytes):
        data = memoryview(bytearray(data))
    source = torch.frombuffer(data, dtype=torch.uint8) if isinstance(data, memoryview) else data
    elements, copy = devices.to_device(source, device)
    if message.strides:
        devices.wait([copy])  # restoring them may copy again, on another stream
    else:
        started.append(copy)
    carrier = CARRIER_DTYPES.get(dtype, dtype)
    tensor = restore_strides(elements.view(carrier), sizes, tuple(message.strides))
    return tensor.view(dtype) if carrier is not dtype else tensor


def check_count(message: agent_pb2.Tensor, sizes: Sequence[int], dtype: torch.dtype, nbytes: int) -> None:
    """Raises ValueError if so many bytes are no elements, or not all of a tensor without strides.

    For a tensor with strides, `restore_strides` checks how many elements they are.
    """
    is_all = message.strides or math.prod(sizes) * dtype.itemsize == nbytes
    if not nbytes or nbytes % dtype.itemsize or not is_all:
        raise ValueError(f"malformed tensor: {nbytes} bytes for shape {tuple(sizes)} of {dtype}")


def local_device(name: str) -> torch.device:
    """Returns the device of this worker that another worker's device map names. Raises ValueError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"malformed tensor: no device is called {name!r}") from None
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"a device map sends a tensor to {device}, but this worker has {count} CUDA devices")
    return torch.device("cuda", device.index or 0)
