"""Small tensors: inside the pickle of a message, in its envelope, or many in one table.

A protobuf message and a payload for each tensor take longer than copying its bytes a few times more. So there are
three shorter ways for plain ones, which are dense and on the CPU:

1. Those without gradients are pickled with their bytes. Those that share memory with other tensors of the message
   are not, because they have to share it at the receiver too. The pickle of a value that is one small tensor, as
   the results of many functions are, is put together here of the opcodes of a call of `small_tensor`: a pickler
   takes twice as long to find out what to write. Python's `pickletools` explains them.
2. If all others of a message are small, their bytes are in their messages, in the envelope. Nothing is chosen for
   these, and nothing looked up.
3. Many tensors of one message are a table of groups, whose elements are one payload: messages and payloads for
   1,000 tensors take ten times as long as copying their elements. One message, the first of an envelope, stands
   for all that are without gaps and not large. A group has those of one dtype that agree in all sizes but the
   first one: one operation of torch concatenates them in the payload, and one takes them apart. The other tensors
   have messages of their own, and their small payloads are parts of the same one. The receiver copies each tensor
   out of the payload, so that a tensor that is kept keeps its own memory only.
"""

import ctypes
import functools
import math
import pickle
import struct
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import Any, final

import numpy as np
import torch

from ...proto.v1 import agent_pb2
from ..contracts.devices import DeviceBuffer
from ..contracts.messages import Buffer
from .parsing import ALIGNMENT
from .tensor_memory import (
    DTYPE_NUMBERS,
    DTYPES_BY_NUMBER,
    MAX_DIMENSIONS,
    NUMPY_DTYPES,
    PLAIN_DTYPES,
    dims_by_descending_stride,
    has_no_gaps,
    is_shape,
)

__all__ = [
    "MAX_GATHERED_BYTES",
    "MAX_SMALL_BYTES",
    "MAX_TINY_BYTES",
    "MIN_TENSORS",
    "SMALL_TENSOR_COST_BYTES",
    "Gathered",
    "GetPayload",
    "TableReader",
    "TableWriter",
    "address_of",
    "contiguous_address",
    "copy_bytes",
    "decode_inline",
    "encode_inline",
    "pickle_small",
    "plain_tensor",
    "reduce_small",
    "small_tensor",
]

MAX_SMALL_BYTES = 64 << 10
"""Bytes of the largest small tensor, and of all that are put into one pickle: others are copied fewer times."""

SMALL_TENSOR_COST_BYTES = 2 << 10
"""What each counts with besides its bytes: copying so many takes as long as the calls for one that is pickled."""

MAX_TINY_BYTES = 4 << 10
"""Bytes of the largest tensor that is copied into a bytes object: for more, other operations take less time."""

MIN_TENSORS = 4
"""Fewer tensors of a message travel one by one."""

MAX_GATHERED_BYTES = 128 << 10
"""Bytes of the largest tensor that is copied out of a payload. Larger ones stay where they are received."""

GetPayload = Callable[[agent_pb2.Payload], Buffer | DeviceBuffer]
"""Returns the received bytes of a payload."""

_SmallBytes = ctypes.c_char * MAX_SMALL_BYTES
"""One type for all sizes, because ctypes takes long to make a type."""

_MAX_DIMENSIONS = slice(MAX_DIMENSIONS + 1)

# For `map`, which takes a third of the time of a loop in Python.
_kind = attrgetter("is_cpu", "layout", "is_nested", "dtype", "requires_grad", "shape")
_is_contiguous, _offset = torch.Tensor.is_contiguous, torch.Tensor.storage_offset
_address = torch.Tensor.data_ptr
_storage, _storage_bytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


def _small_address(tensor: torch.Tensor, max_bytes: int) -> int:
    """Returns the address of the elements of a plain torch.Tensor of `max_bytes` at most; 0 if it is none."""
    if not tensor.is_cpu or tensor.requires_grad or tensor.layout is not torch.strided:
        return 0
    nbytes = tensor.nbytes
    if not 0 < nbytes <= max_bytes or tensor.dtype not in PLAIN_DTYPES or tensor.is_nested:
        return 0
    return contiguous_address(tensor, nbytes)


def contiguous_address(tensor: torch.Tensor, nbytes: int) -> int:
    """Returns the address of the elements of a dense CPU tensor; 0 if it is not contiguous, or has no memory."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return 0
    # FSDP, for one, takes the memory of tensors away.
    if tensor.storage_offset() * tensor.itemsize + nbytes > tensor.untyped_storage().nbytes():
        return 0
    return tensor.data_ptr()


def copy_bytes(address: int, nbytes: int) -> bytes:
    """Returns what is in memory at an address."""
    if nbytes > MAX_SMALL_BYTES:
        return ctypes.string_at(address, nbytes)
    data: bytes = _SmallBytes.from_address(address)[:nbytes]  # type: ignore[assignment] # takes half as long
    return data


# Inside the pickle.


def reduce_small(tensor: torch.Tensor) -> tuple[int, tuple[Any, ...]] | None:
    """Returns the address of the storage of a tensor and how to pickle it; None if it is not small.

    Its class is exactly torch.Tensor. It has to stay alive until it is pickled.
    """
    address = _small_address(tensor, MAX_SMALL_BYTES)
    if not address:
        return None
    data: bytes | pickle.PickleBuffer
    if (nbytes := tensor.nbytes) <= MAX_TINY_BYTES:
        data = copy_bytes(address, nbytes)
    else:  # copied by the pickler from where it is; the receiver gets a bytearray of its own
        data = pickle.PickleBuffer(memoryview(_SmallBytes.from_address(address)).cast("B")[:nbytes])
    storage = address - int(tensor.storage_offset()) * tensor.itemsize
    return storage, (small_tensor, (DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), data))


def small_tensor(
    dtype_number: agent_pb2.DType.ValueType, sizes: tuple[int, ...], data: bytes | bytearray
) -> torch.Tensor:
    """Returns a tensor that has been pickled with its bytes; a bytearray becomes its memory.

    Raises ValueError if the bytes contradict the shape.
    """
    dtype = DTYPES_BY_NUMBER.get(dtype_number)
    if (
        len(sizes) > MAX_DIMENSIONS
        or dtype is None
        or dtype not in PLAIN_DTYPES
        or math.prod(sizes) * dtype.itemsize != len(data)
        or not data
    ):
        raise ValueError(
            f"malformed tensor: {len(data)} bytes for shape {sizes!r:.1000} of dtype number {dtype_number}"
        )
    tensor = torch.frombuffer(data if type(data) is bytearray else bytearray(data), dtype=dtype)
    # Detached so that autograd does not treat it as a view: in-place changes would be recorded on its base.
    try:
        return tensor if len(sizes) == 1 else tensor.view(sizes).detach()
    except RuntimeError as error:
        raise ValueError(f"malformed tensor: {error}") from None


def _short_text(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


_CALLEE = b"".join(
    (
        pickle.PROTO + bytes([5]),
        _short_text(small_tensor.__module__),
        _short_text(small_tensor.__name__),
        pickle.STACK_GLOBAL,
    )
)
_CALL = pickle.TUPLE3 + pickle.REDUCE + pickle.STOP

_UINT32 = struct.Struct("<I")


def pickle_small(tensor: torch.Tensor) -> bytes | None:
    """Returns the pickle of a tensor of exactly the class torch.Tensor; None if the pickler has to make it."""
    address = _small_address(tensor, MAX_TINY_BYTES)
    if not address:
        return None
    nbytes = tensor.nbytes
    return _up_to_data(tensor.dtype, tensor.shape, nbytes) + copy_bytes(address, nbytes) + _CALL


@functools.lru_cache(maxsize=1024)
def _up_to_data(dtype: torch.dtype, sizes: torch.Size, nbytes: int) -> bytes:
    """Returns what comes before the bytes of a tensor."""
    number = pickle.BININT1 + bytes([DTYPE_NUMBERS[dtype]])
    shape = b"".join((pickle.MARK, *(pickle.BININT + _UINT32.pack(size) for size in sizes), pickle.TUPLE))
    return _CALLEE + number + shape + pickle.BINBYTES + _UINT32.pack(nbytes)


# In the envelope.


def encode_inline(
    tensors: Sequence[torch.Tensor], leaves: AbstractSet[int], envelope: agent_pb2.Envelope, max_bytes: int
) -> int | None:
    """Puts all tensors of a message, which go to a CPU, into its envelope, if they are plain and small.

    `leaves` are the indices of tensors that require grad but arrive as autograd leaves. Returns the bytes of the
    elements; None, with the envelope unchanged, if these are more than `max_bytes`, or if some tensor is not plain
    or may share memory with another one.
    """
    nbytes = 0
    elements: list[bytes] = []
    is_alone = len(tensors) == 1
    for index, tensor in enumerate(tensors):
        size = tensor.nbytes if tensor.is_cpu and tensor.layout is torch.strided else 0
        nbytes += size
        if (
            not size
            or nbytes > max_bytes
            or tensor.dtype not in NUMPY_DTYPES
            or tensor.is_nested
            # Tensors that require grad share no memory at the receiver.
            or not (is_alone or (tensor.requires_grad and index not in leaves))
            or not (address := contiguous_address(tensor, size))
        ):
            return None
        elements.append(copy_bytes(address, size))
    add = envelope.tensors.add
    for tensor, data in zip(tensors, elements, strict=True):
        message = add(dtype=DTYPE_NUMBERS[tensor.dtype], sizes=tensor.shape, requires_grad=tensor.requires_grad)
        message.data.inline = data
    return nbytes


def decode_inline(messages: Iterable[agent_pb2.Tensor]) -> tuple[list[torch.Tensor], int] | None:
    """Returns all tensors of an envelope and their bytes, in memory that nothing else uses.

    Returns None if the elements of some are not in the envelope, or if some are not plain, or malformed, which
    `decode_tensors` tells.
    """
    tensors: list[torch.Tensor] = []
    nbytes = 0
    for message in messages:
        dtype = DTYPES_BY_NUMBER.get(message.dtype)
        sizes = tuple(message.sizes[_MAX_DIMENSIONS])
        data = message.data.inline
        if (
            not data
            or dtype not in PLAIN_DTYPES
            or message.device
            or message.strides
            or message.parts
            or message.HasField("shared")
            or not is_shape(sizes)
            or math.prod(sizes) * dtype.itemsize != len(data)
        ):
            return None
        tensors.append(plain_tensor(bytearray(data), sizes, dtype, requires_grad=message.requires_grad))
        nbytes += len(data)
    return tensors, nbytes


def plain_tensor(
    memory: bytearray | memoryview, sizes: Sequence[int], dtype: torch.dtype, *, requires_grad: bool
) -> torch.Tensor:
    """Returns a contiguous tensor of a plain dtype in the memory of a buffer, which has as many elements."""
    tensor = torch.frombuffer(memory, dtype=dtype)
    if len(sizes) != 1:
        # Detached so that autograd does not treat it as a view: in-place changes would be recorded on its base.
        tensor = tensor.view(sizes).detach()
    if requires_grad and (dtype.is_floating_point or dtype.is_complex):
        tensor.requires_grad_()
    return tensor


# In a table.


def address_of(data: memoryview) -> int:
    """Returns where bytes are, which somebody has to keep alive."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@final
class Gathered:
    """What is copied into one payload: groups, each of which begins at a multiple of ALIGNMENT."""

    __slots__ = ("_groups", "_parts", "nbytes")

    def __init__(self) -> None:
        self._groups: list[tuple[int, list[torch.Tensor], int]] = []
        """Tensors, their place in the payload, and the number of their elements."""
        self._parts: list[tuple[int, memoryview]] = []
        """Other bytes, and theirs."""
        self.nbytes = 0
        """Bytes of the payload so far."""

    def add(self, tensors: list[torch.Tensor], count: int) -> None:
        """Adds so many elements of tensors, whose place the receiver knows.

        The tensors have one dtype and, except for the first dimension, the same sizes. They must not change before
        they are copied.
        """
        self._groups.append((self._reserve(count * tensors[0].itemsize), tensors, count))

    def put(self, data: memoryview) -> agent_pb2.Payload:
        """Adds other bytes; returns where the receiver finds them."""
        place = self._reserve(data.nbytes)
        self._parts.append((place, data.cast("B")))
        return agent_pb2.Payload(gathered=agent_pb2.GatheredPayload(offset=place, nbytes=data.nbytes))

    def _reserve(self, nbytes: int) -> int:
        place = self.nbytes + -self.nbytes % ALIGNMENT
        self.nbytes = place + nbytes
        return place

    def copy_to(self, target: memoryview) -> None:
        """Copies all of it to the beginning of some memory."""
        for place, data in self._parts:
            target[place : place + data.nbytes] = data
        with torch.no_grad():  # one operation for each group
            for place, tensors, count in self._groups:
                flat = torch.frombuffer(target, dtype=tensors[0].dtype, count=count, offset=place)
                torch.cat(tensors, out=flat.view(-1, *tensors[0].shape[1:]))

    def joined(self) -> memoryview:
        """Returns a copy of all of it."""
        data = memoryview(bytearray(self.nbytes))
        self.copy_to(data)
        return data

    def has_same_source(self, other: "Gathered") -> bool:
        """Returns whether another one copies from the same memory."""
        return self._sources() == other._sources()

    def _sources(self) -> list[tuple[int, list[int]]]:
        return [(place, list(map(_address, tensors))) for place, tensors, _ in self._groups] + [
            (place, [address_of(data)]) for place, data in self._parts
        ]


@final
class TableWriter:
    """Puts tensors of one message into a table. They must not change until the payload is copied."""

    def __init__(self) -> None:
        self.table = agent_pb2.TensorTable()
        self.gathered = Gathered()
        """The payload of the table."""
        self._added: set[int] = set()

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor], excluded: Container[int]) -> list[int]:
        """Adds the tensors of a message that a table can have, but for those with the `excluded` indices.

        Returns the indices of those that were not added.
        """
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for position, kind in enumerate(map(_kind, tensors)):
            if position not in excluded:
                by_kind[kind].append(position)
        by_rows: dict[Any, tuple[list[int], list[torch.Tensor], list[int]]] = defaultdict(lambda: ([], [], []))
        for (is_cpu, layout, is_nested, dtype, requires_grad, shape), positions in by_kind.items():
            if (
                is_cpu
                and layout is torch.strided
                and not is_nested
                and dtype in PLAIN_DTYPES
                and 0 < (nbytes := math.prod(shape) * dtype.itemsize) <= MAX_GATHERED_BYTES
                and len(shape) < MAX_DIMENSIONS
            ):
                found, alike = positions, [tensors[position] for position in positions]
                if not all(map(_is_contiguous, alike)) or not _have_memory(alike, nbytes):
                    found, alike = self._add_permuted(positions, alike, nbytes)
                if shape:
                    all_positions, all_tensors, rows = by_rows[dtype, requires_grad, shape[1:]]
                    all_positions += found
                    all_tensors += alike
                    rows += [shape[0]] * len(found)
                else:
                    self._add(found, [each.view(1) for each in alike], ())
        for (_, _, sizes), (positions, alike, rows) in by_rows.items():
            self._add(positions, alike, sizes, rows=rows)
        return [position for position in range(len(tensors)) if position not in self._added]

    def _add_permuted(
        self, positions: list[int], tensors: list[torch.Tensor], nbytes: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Adds those of some tensors of one shape that are permuted, without gaps in their memory.

        Returns the positions of those that are contiguous, and these.
        """
        by_strides: dict[Any, list[int]] = defaultdict(list)
        contiguous: list[int] = []
        have_all = _have_memory(tensors, nbytes)
        for index, tensor in enumerate(tensors):
            if have_all or _have_memory([tensor], nbytes):
                if tensor.is_contiguous():
                    contiguous.append(index)
                else:
                    by_strides[tensor.stride()].append(index)
        shape = tensors[0].shape
        for strides, found in by_strides.items():
            if has_no_gaps(shape, strides):
                order = dims_by_descending_stride(strides)
                alike = [tensors[index].permute(order) for index in found]
                self._add([positions[index] for index in found], alike, alike[0].shape, order=order)
        return [positions[index] for index in contiguous], [tensors[index] for index in contiguous]

    def _add(
        self,
        positions: list[int],
        tensors: list[torch.Tensor],
        sizes: Sequence[int],
        *,
        rows: Sequence[int] = (),
        order: Sequence[int] = (),
    ) -> None:
        """Adds a group of contiguous tensors of the shape `sizes`.

        With `rows`, the sizes of their first dimensions, `sizes` are the others. `order` is how the dimensions of
        all were permuted to make them contiguous.
        """
        if not positions:
            return
        self._added.update(positions)
        self.table.groups.add(
            positions=positions,
            dtype=DTYPE_NUMBERS[tensors[0].dtype],
            sizes=sizes,
            rows=rows,
            order=order,
            requires_grad=tensors[0].requires_grad,
        )
        self.gathered.add(tensors, math.prod(sizes) * (sum(rows) if rows else len(tensors)))


def _have_memory(tensors: Sequence[torch.Tensor], nbytes: int) -> bool:
    """Returns whether the storages of tensors, of `nbytes` each, have all of their elements.

    FSDP, for one, takes the memory of tensors away.
    """
    itemsize, least = tensors[0].itemsize, min(map(_storage_bytes, map(_storage, tensors)))
    if max(map(_offset, tensors)) * itemsize + nbytes <= least:
        return True
    return all(each.storage_offset() * itemsize + nbytes <= each.untyped_storage().nbytes() for each in tensors)


@final
class TableReader:
    """Takes the tensors of one message out of the payload of its table. Used by one thread."""

    def __init__(self, message: agent_pb2.Tensor, count: int, get: GetPayload) -> None:
        """Reads the payload of the first message of an envelope, which has a table.

        `count` tensors have messages of their own. Raises ValueError if the message contradicts itself.
        """
        data = get(message.data)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ValueError("malformed tensors: the elements of many are in device memory")
        self._data = memoryview(bytearray(data) if isinstance(data, bytes) else data)
        self._get = get
        self._nbytes = 0
        """Bytes of the payload up to the end of what has been copied; of other parts, their sum."""
        self._tensors: dict[int, torch.Tensor] = {}
        """Those of the table, by their positions among the tensors of the message."""
        total = 0
        for group in message.table.groups:
            self._tensors.update(zip(group.positions, self._read(group), strict=True))
            total += len(group.positions)
        if len(self._tensors) != total or max(self._tensors, default=0) >= total + count:
            raise ValueError("malformed tensors: their positions are not those of a list")

    def _read(self, group: agent_pb2.TensorGroup) -> Sequence[torch.Tensor]:
        """Returns the tensors of the next group."""
        count, rows, dtype = len(group.positions), list(group.rows), DTYPES_BY_NUMBER.get(group.dtype)
        sizes, order = tuple(group.sizes[:MAX_DIMENSIONS]), tuple(group.order[:MAX_DIMENSIONS])
        if (
            dtype not in PLAIN_DTYPES
            or not count
            or 0 in sizes
            or 0 in rows
            or len(sizes) == MAX_DIMENSIONS
            or (order or len(rows) != count if rows else sorted(order) != list(range(len(sizes))))
        ):
            shape = f"{len(rows)} numbers of rows, shape {sizes}, order {order}"
            raise ValueError(f"malformed tensor: {count} of dtype number {group.dtype}, {shape}")
        elements = math.prod(sizes) * (sum(rows) if rows else count)
        begin = self._nbytes + -self._nbytes % ALIGNMENT
        self._nbytes = begin + elements * dtype.itemsize
        if self._nbytes > len(self._data):  # before memory is allocated
            raise ValueError(f"malformed tensor: bytes {begin} to {self._nbytes} of {len(self._data)}")
        flat = torch.frombuffer(self._data, dtype=dtype, count=elements, offset=begin)
        tensors: Sequence[torch.Tensor]
        if rows:
            split: Any = torch.split_with_sizes_copy  # whose type stub has no result
            tensors = split(flat.view(-1, *sizes), rows)
        else:
            inverse = [1 + order.index(dim) for dim in range(len(order))]
            tensors = [each.clone() for each in flat.view(count, *sizes).permute(0, *inverse).unbind()]
        if group.requires_grad and (dtype.is_floating_point or dtype.is_complex):
            for tensor in tensors:
                tensor.requires_grad_()
        return tensors

    def get(self, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
        """Returns the bytes of a payload of another tensor, which may be a part of that of the table."""
        if not payload.HasField("gathered"):
            return self._get(payload)
        begin, nbytes = payload.gathered.offset, payload.gathered.nbytes
        self._nbytes += nbytes  # what several tensors named would be copied for each
        if max(self._nbytes, begin + nbytes) > len(self._data):
            raise ValueError(f"malformed tensor: {nbytes} bytes at {begin} of {len(self._data)}")
        return memoryview(bytearray(self._data[begin : begin + nbytes]))

    def merge(self, others: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the tensors of the message in their order, given those that are not in the table."""
        rest, found = iter(others), self._tensors
        return [found[each] if each in found else next(rest) for each in range(len(found) + len(others))]
