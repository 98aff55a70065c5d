"""Tensors as protobuf messages, and back: dtype, shape, and where the bytes of their elements are.

`small_tensors` has shorter ways for small ones. Elements on CUDA devices go by way of device memory where the
channels can do that, else by way of the host. All copies of a message are started before the first is waited for.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import TypeVar

import torch

from ...proto.v1 import agent_pb2
from ...torch_internals import quantized, quantized_per_channel
from ..contracts.devices import NO_DEVICES, DeviceBuffer, DeviceMap, DeviceReader, DeviceWriter, StartedCopy
from ..contracts.messages import Buffer
from .small_tensors import (
    MAX_GATHERED_BYTES,
    MAX_TINY_BYTES,
    MIN_TENSORS,
    Gathered,
    GetPayload,
    TableReader,
    TableWriter,
    contiguous_address,
    copy_bytes,
    plain_tensor,
)
from .tensor_memory import (
    DTYPE_NUMBERS,
    DTYPES_BY_NUMBER,
    INTEGER_DTYPES,
    MAX_DIMENSIONS,
    NUMPY_DTYPES,
    PLAIN_DTYPES,
    as_bytes,
    count_sent,
    find_shared,
    from_bytes,
    is_shape,
    restore_shared,
    span,
)

__all__ = [
    "UnmappedDeviceError",
    "bytes_of",
    "check_all_sendable",
    "check_sendable",
    "decode_tensors",
    "encode_tensors",
]

PutPayload = Callable[[memoryview], agent_pb2.Payload]
"""Sends bytes, and returns where the receiver finds them."""

T = TypeVar("T")

_CPU = torch.device("cpu")

# For `map`, which takes a third of the time of a loop in Python.
_is_contiguous, _dim = torch.Tensor.is_contiguous, torch.Tensor.dim
_dtype, _layout, _nbytes = attrgetter("dtype"), attrgetter("layout"), attrgetter("nbytes")
_is_cpu, _is_meta, _is_nested = attrgetter("is_cpu"), attrgetter("is_meta"), attrgetter("is_nested")

_LAYOUT_NUMBERS: dict[torch.layout, agent_pb2.SparseLayout.ValueType] = {
    torch.sparse_coo: agent_pb2.SPARSE_COO,
    torch.sparse_csr: agent_pb2.SPARSE_CSR,
    torch.sparse_csc: agent_pb2.SPARSE_CSC,
    torch.sparse_bsr: agent_pb2.SPARSE_BSR,
    torch.sparse_bsc: agent_pb2.SPARSE_BSC,
}
_CHANNEL_DTYPES = ((torch.float64, torch.int64), (torch.float32, torch.float32))
"""Dtypes of the scales and zero points of channels."""

_LAYOUTS_BY_NUMBER = {number: layout for layout, number in _LAYOUT_NUMBERS.items()}


class UnmappedDeviceError(ValueError):
    """A tensor is on a device that is not in the device map; the sender adds what to do about it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(f"it is a tensor on {device}, and no device map says where it goes")
        self.device = device


def check_sendable(tensor: torch.Tensor, device_map: DeviceMap) -> None:
    """Checks that a tensor can be sent.

    Raises:
        UnmappedDeviceError: it is on a device that is not in `device_map`.
        ValueError: it cannot be sent; the text says what to send instead.
    """
    if tensor.dim() > MAX_DIMENSIONS:
        raise ValueError(f"it is a tensor of {tensor.dim()} dimensions, of {MAX_DIMENSIONS} at most: reshape it")
    if _is_plain(tensor):
        return
    if tensor.is_nested:
        raise ValueError(
            "it is a nested tensor of strided layout: send its tensors, tensor.unbind(), or make it with "
            "layout=torch.jagged"
        )
    if tensor.layout is not torch.strided and tensor.layout not in _LAYOUT_NUMBERS:
        raise ValueError(f"it is a tensor of layout {tensor.layout}: send tensor.to_dense()")
    device = tensor.device.type
    if device == "meta" and tensor.layout is not torch.strided:
        raise ValueError("it is a sparse tensor on meta: only dense tensors can be sent without elements")
    if device not in ("cpu", "meta") and tensor.device not in device_map:
        raise UnmappedDeviceError(tensor.device)
    if tensor.dtype not in DTYPE_NUMBERS:
        raise ValueError(f"it is a tensor of dtype {tensor.dtype}: send a tensor of another dtype")
    if tensor.dtype in INTEGER_DTYPES:
        try:
            scheme = tensor.qscheme()
        except RuntimeError:
            raise ValueError(
                "it is a quantized tensor without scale and zero point: make it with torch.quantize_per_tensor"
            ) from None
        if tensor.dtype is torch.qint32 and scheme is torch.per_channel_affine_float_qparams:
            raise ValueError("it is a tensor of qint32 with zero points that are floats: give them as integers")


def check_all_sendable(tensors: Sequence[torch.Tensor], device_map: DeviceMap) -> None:
    """Checks each of the tensors of a message as `check_sendable` does."""
    if (
        len(tensors) < MIN_TENSORS
        or not all(map(_is_cpu, tensors))
        or set(map(_layout, tensors)) != {torch.strided}
        or not set(map(_dtype, tensors)) <= PLAIN_DTYPES
        or any(map(_is_nested, tensors))
        or max(map(_dim, tensors)) > MAX_DIMENSIONS
    ):
        for tensor in tensors:
            if not _is_plain(tensor) or tensor.dim() > MAX_DIMENSIONS:
                check_sendable(tensor, device_map)


# Encoding.


def encode_tensors(
    tensors: Sequence[torch.Tensor],
    put: PutPayload,
    device_map: DeviceMap = NO_DEVICES,
    leaves: AbstractSet[int] = frozenset(),
    devices: DeviceWriter | None = None,
    put_gathered: Callable[[Gathered], agent_pb2.Payload] | None = None,
) -> list[agent_pb2.Tensor]:
    """Returns the messages for the tensors of one envelope, and sends their elements.

    Args:
        tensors: all tensors of the envelope, since memory that several of them share is sent once.
        put: sends the elements of one tensor, which are in the memory of the host.
        device_map: devices of this worker to devices of the receiver.
        leaves: indices of tensors that require grad but arrive as autograd leaves.
        devices: sends the elements of CUDA tensors; by default they are copied to the host one by one.
        put_gathered: sends those of many small tensors at once; by default they are sent one by one.
    """
    made: Mapping[int, agent_pb2.Tensor] = {}
    if len(tensors) > 1 and _CPU not in device_map and (shared := find_shared(tensors, leaves)):
        made = {
            index: _header(tensors[index], shared=place, strides=tensors[index].stride())
            for index, place in shared.items()
        }
    if device_map and devices is not None:
        made = {**made, **_encode_from_devices(tensors, put, device_map, devices)}
    if put_gathered is not None and len(tensors) >= MIN_TENSORS and not device_map:
        return _encode_many(tensors, put, put_gathered, made)
    return [
        made[index] if index in made else _encode(tensor, put, device_map) for index, tensor in enumerate(tensors)
    ]


def _encode_from_devices(
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
        message = messages[index] = _header(tensor)
        if target.type != "cpu":
            message.device = str(target)
        if not tensor.numel():
            continue
        strides, elements = as_bytes(tensor.detach())
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


def _encode_many(
    tensors: Sequence[torch.Tensor],
    put: PutPayload,
    put_gathered: Callable[[Gathered], agent_pb2.Payload],
    made: Mapping[int, agent_pb2.Tensor],
) -> list[agent_pb2.Tensor]:
    """Does what `encode_tensors` does, with a table of those that can be in one."""
    table = TableWriter()
    others, gathered = table.take(tensors, made), table.gathered

    def put_small(data: memoryview) -> agent_pb2.Payload:
        return gathered.put(data) if 0 < data.nbytes <= MAX_GATHERED_BYTES else put(data)

    messages = [made[index] if index in made else _encode(tensors[index], put_small) for index in others]
    if gathered.nbytes:
        messages.insert(0, agent_pb2.Tensor(data=put_gathered(gathered), table=table.table))
    return messages


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on the CPU, dense and of a plain dtype, as nearly all are."""
    return (
        tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in PLAIN_DTYPES and not tensor.is_nested
    )


def _encode_plain(tensor: torch.Tensor, put: PutPayload) -> agent_pb2.Tensor | None:
    """Does what `_encode` does, for a tensor whose elements can be sent from where they are; else returns None."""
    nbytes = tensor.nbytes if _is_plain(tensor) else 0
    if not nbytes or not (address := contiguous_address(tensor, nbytes)):
        return None
    message = agent_pb2.Tensor(dtype=DTYPE_NUMBERS[tensor.dtype], sizes=tensor.shape)
    requires_grad = message.requires_grad = tensor.requires_grad
    if nbytes <= MAX_TINY_BYTES:  # a copy takes less time than operations of torch
        data = memoryview(copy_bytes(address, nbytes))
    else:
        data = (tensor.detach() if requires_grad else tensor).numpy().data.cast("B")
    message.data.CopyFrom(put(data))
    return message


def _header(
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


def _encode(tensor: torch.Tensor, put: PutPayload, device_map: DeviceMap = NO_DEVICES) -> agent_pb2.Tensor:
    if (
        tensor.dtype in NUMPY_DTYPES
        and _CPU not in device_map
        and (plain := _encode_plain(tensor, put)) is not None
    ):
        return plain
    message = _header(tensor)
    if tensor.device.type == "meta":
        message.device = "meta"
        message.strides.extend(tensor.stride())
        return message
    if (target := torch.device(device_map.get(tensor.device, "cpu"))).type != "cpu":
        message.device = str(target)
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        message.layout = _LAYOUT_NUMBERS[tensor.layout]
        message.coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        message.parts.extend(_encode(part, put) for part in _components(tensor))
        return message
    if tensor.is_quantized:
        if tensor.qscheme() is torch.per_tensor_affine:
            message.quantization.scale, message.quantization.zero_point = tensor.q_scale(), tensor.q_zero_point()
        else:
            message.quantization.axis = tensor.q_per_channel_axis()
            parts = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
            message.parts.extend(_encode(part, put) for part in parts)
    if tensor.numel():
        _check_memory(tensor)
        strides, elements = as_bytes(tensor)
        message.strides.extend(strides)
        message.data.CopyFrom(put(elements.cpu().numpy().data))
    return message


def _check_memory(tensor: torch.Tensor) -> None:
    """Raises ValueError for a dense tensor with elements that its storage does not have."""
    needed = (int(tensor.storage_offset()) + span(tensor.shape, tensor.stride())) * tensor.itemsize
    if (has := tensor.untyped_storage().nbytes()) < needed:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be sent, because its memory has {has} of {needed} "
            "bytes: FSDP, for one, takes it away; send it while it has all"
        )


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that are sent of tensors; memory that they share is counted for each of them."""
    try:
        if all(map(_is_contiguous, tensors)) and not any(map(_is_meta, tensors)):  # the way of nearly all messages
            return sum(map(_nbytes, tensors))
    except RuntimeError:  # of a tensor without strides, as a sparse one
        pass
    return sum(
        (_dense_bytes(tensor) if tensor.layout is torch.strided else bytes_of(_components(tensor)))
        for tensor in tensors
        if not tensor.is_meta
    )


def _dense_bytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    return count_sent(tensor.shape, tensor.stride()) * tensor.itemsize


def _components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns indices and values of a sparse tensor, in the order of torch's constructors."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


# Decoding.


def decode_tensors(
    messages: Iterable[agent_pb2.Tensor], get: GetPayload, devices: DeviceReader | None = None
) -> list[torch.Tensor]:
    """Returns the tensors of an envelope, in memory that nothing else uses, on the devices that the messages name.

    No memory is allocated for sizes that do not match received bytes. `get` returns the received bytes of a
    payload.

    Args:
        messages: the messages of all tensors of the envelope.
        get: returns the received bytes of a payload.
        devices: copies elements to CUDA devices; by default one tensor after the other is copied.

    Raises:
        ValueError: a message contradicts itself, or names a device that this worker does not have.
        RuntimeError: a device has failed, or has no memory.
    """
    messages = list(messages)
    table = None
    if messages and messages[0].HasField("table"):
        table = TableReader(messages.pop(0), len(messages), get)
        get = table.get
    started: list[StartedCopy] = []
    try:
        tensors = [
            None if message.HasField("shared") else _decode(message, get, devices, started) for message in messages
        ]
    finally:
        if started and devices is not None:
            devices.wait(started)  # also of a message that is malformed: the memory goes back to its owners
    if table is not None:
        tensors = table.merge(tensors)
    sharing = (message for message in messages if message.HasField("shared"))
    return [_decode_shared(next(sharing), tensors) if tensor is None else tensor for tensor in tensors]


def _decode_shared(message: agent_pb2.Tensor, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    index = message.shared.tensor
    base = tensors[index] if index < len(tensors) else None
    if base is None or DTYPES_BY_NUMBER.get(message.dtype) != base.dtype:
        raise ValueError(f"malformed tensor: it shares the memory of tensor {index}, which has none of its own")
    try:
        tensor = restore_shared(base, message)
    except RuntimeError as error:
        raise ValueError(f"malformed tensor: {error}") from None
    return _finish(tensor, message) if message.requires_grad else tensor


def _decode(
    message: agent_pb2.Tensor,
    get: GetPayload,
    devices: DeviceReader | None = None,
    started: list[StartedCopy] | None = None,
) -> torch.Tensor:
    """Returns the tensor of a message, on its device. Its copy may still have to be waited for, as `started` says.

    What torch raises before it copies to a device is due to the message, and becomes a ValueError.
    """
    dtype = DTYPES_BY_NUMBER.get(message.dtype)
    sizes = tuple(message.sizes[: MAX_DIMENSIONS + 1])
    if dtype is None or not is_shape(sizes):
        raise ValueError(f"malformed tensor: dtype number {message.dtype}, shape {sizes}")
    is_copied = message.device not in ("", "meta")
    is_dense = is_copied and not message.parts and dtype not in INTEGER_DTYPES and 0 not in sizes
    if is_dense and devices is not None and started is not None:
        data = get(message.data)
        return _finish(_decode_on_device(message, sizes, dtype, data, devices, started), message)
    try:
        if not message.device and not message.parts and not message.strides and dtype in PLAIN_DTYPES:
            return _decode_plain(message, sizes, dtype, get)
        tensor = _decode_on_host(message, sizes, dtype, get)
    except RuntimeError as error:
        raise ValueError(f"malformed tensor: {error}") from None
    return _finish(tensor.to(_local_device(message.device)) if is_copied else tensor, message)


def _decode_on_host(
    message: agent_pb2.Tensor, sizes: Sequence[int], dtype: torch.dtype, get: GetPayload
) -> torch.Tensor:
    """Returns the tensor of a message on the CPU, from where it is copied to a device, or on meta."""
    if message.device == "meta":
        if min(message.strides, default=0) < 0:
            raise ValueError(f"malformed tensor: strides {tuple(message.strides)}")
        return torch.empty_strided(sizes, tuple(message.strides), dtype=dtype, device="meta")
    if message.parts and dtype not in INTEGER_DTYPES:
        return _decode_sparse(message, sizes, get)
    if 0 in sizes:
        # Not one of this dtype: torch fills new memory in deterministic programs, which it cannot for all dtypes.
        tensor = from_bytes(torch.empty(0, dtype=torch.uint8), sizes, (), dtype)
    else:
        data = get(message.data)
        _check_count(message, sizes, dtype, len(data))
        elements = torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)
        tensor = from_bytes(elements, sizes, tuple(message.strides), dtype)
    return _decode_quantized(message, tensor, dtype, get) if dtype in INTEGER_DTYPES else tensor


def _decode_plain(
    message: agent_pb2.Tensor, sizes: Sequence[int], dtype: torch.dtype, get: GetPayload
) -> torch.Tensor:
    """Returns a contiguous tensor of a plain dtype on the CPU."""
    count = math.prod(sizes)
    if not count:
        return _finish(torch.empty(sizes, dtype=dtype), message)
    data = get(message.data)
    if count * dtype.itemsize != len(data):
        raise ValueError(f"malformed tensor: {len(data)} bytes for shape {sizes} of {dtype}")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError("malformed tensor: its elements are in device memory, and it is not")
    memory = bytearray(data) if isinstance(data, bytes) else data
    return plain_tensor(memory, sizes, dtype, requires_grad=message.requires_grad)


def _decode_on_device(
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
    device = _local_device(message.device)
    _check_count(message, sizes, dtype, len(data))
    if isinstance(data, bytes):
        data = memoryview(bytearray(data))
    source = torch.frombuffer(data, dtype=torch.uint8) if isinstance(data, memoryview) else data
    elements, copy = devices.to_device(source, device)
    if message.strides:
        devices.wait([copy])  # restoring them may copy again, on another stream
    else:
        started.append(copy)
    return from_bytes(elements, sizes, tuple(message.strides), dtype)


def _check_count(message: agent_pb2.Tensor, sizes: Sequence[int], dtype: torch.dtype, nbytes: int) -> None:
    """Raises ValueError if so many bytes are no elements, or not all of a tensor without strides.

    For a tensor with strides, `from_bytes` checks how many elements they are.
    """
    is_all = message.strides or math.prod(sizes) * dtype.itemsize == nbytes
    if not nbytes or nbytes % dtype.itemsize or not is_all:
        raise ValueError(f"malformed tensor: {nbytes} bytes for shape {tuple(sizes)} of {dtype}")


def _local_device(name: str) -> torch.device:
    """Returns the device of this worker that another worker's device map names. Raises ValueError."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"malformed tensor: no device is called {name!r}") from None
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"a device map sends a tensor to {device}, but this worker has {count} CUDA devices")
    return torch.device("cuda", device.index or 0)


def _finish(tensor: torch.Tensor, message: agent_pb2.Tensor) -> torch.Tensor:
    # Detached so that autograd does not treat it as a view: in-place changes would be recorded on its base.
    tensor = tensor.detach()
    if message.requires_grad and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        tensor.requires_grad_()
    return tensor


def _decode_sparse(message: agent_pb2.Tensor, sizes: Sequence[int], get: GetPayload) -> torch.Tensor:
    layout = _LAYOUTS_BY_NUMBER.get(message.layout)
    expected = 2 if layout is torch.sparse_coo else 3
    has_parts = len(message.parts) == expected and not any(part.parts or part.device for part in message.parts)
    if layout is None or not has_parts:
        raise ValueError(f"malformed sparse tensor: {len(message.parts)} parts, layout number {message.layout}")
    *indices, values = (_decode(part, get) for part in message.parts)
    try:
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                indices[0], values, tuple(sizes), is_coalesced=message.coalesced, check_invariants=True
            )
        return _retry_on_warning(
            lambda: torch.sparse_compressed_tensor(
                indices[0], indices[1], values, tuple(sizes), layout=layout, check_invariants=True
            )
        )
    except RuntimeError as error:
        raise ValueError(f"malformed sparse tensor: {error}") from None


def _decode_quantized(
    message: agent_pb2.Tensor, integers: torch.Tensor, dtype: torch.dtype, get: GetPayload
) -> torch.Tensor:
    """Returns the quantized tensor with these integers, in their memory."""
    header, sizes = message.quantization, integers.shape
    if not message.parts:
        return _retry_on_warning(lambda: quantized(integers, dtype, header.scale, header.zero_point))
    axis = header.axis
    if any(part.parts or part.device for part in message.parts) or not 0 <= axis < len(sizes):
        raise ValueError(f"malformed tensor: quantized along axis {axis} of shape {tuple(sizes)}")
    parts = [_decode(part, get) for part in message.parts]
    if [tuple(part.shape) for part in parts] != [(sizes[axis],)] * 2:
        raise ValueError(f"malformed tensor: not one scale for each of {sizes[axis]} channels")
    dtypes = tuple(part.dtype for part in parts)
    # torch ends the process where it reads qint32 with zero points that are floats.
    if dtypes not in _CHANNEL_DTYPES or (dtype is torch.qint32 and dtypes[1].is_floating_point):
        raise ValueError(f"malformed tensor: scales and zero points of dtypes {dtypes}")
    return _retry_on_warning(lambda: quantized_per_channel(integers, dtype, parts[0], parts[1], axis))


def _retry_on_warning(make: Callable[[], T]) -> T:
    """Returns what `make` returns, in programs that turn warnings into errors as well.

    torch warns the first time a program makes such a tensor, and not the second time.
    """
    try:
        return make()
    except Warning:
        return make()
