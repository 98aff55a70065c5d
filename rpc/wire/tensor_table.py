"""Many small tensors of one message as a flat table, whose elements are one payload.

A protobuf message and a payload for each of 1,000 tensors take ten times as long as copying their elements. So
one message, the first of an envelope, stands for all that are dense, without gaps, of plain dtypes and not large;
what it says of them is in lists of numbers. The others have messages of their own, and their small payloads are
parts of the same one, behind.

The receiver copies each tensor out of the payload. So a tensor that is kept keeps its own memory only.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter

import torch

from ...proto.v1 import agent_pb2
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.messages import Buffer
from .dtypes import DTYPE_NUMBERS, DTYPES_BY_NUMBER, PLAIN_DTYPES
from .gathered import ALIGNMENT, Gathered, address_of, copy_memory
from .strides import MAX_DIMENSIONS, has_no_gaps, is_shape

__all__ = ["MAX_GATHERED_BYTES", "MIN_TENSORS", "TableReader", "TableWriter"]

MIN_TENSORS = 4
"""Fewer tensors of a message travel one by one."""

MAX_GATHERED_BYTES = 128 << 10
"""Bytes of the largest tensor that is copied out of a payload. Larger ones stay where they are received."""

_features = attrgetter("is_cpu", "layout", "dtype", "is_nested", "shape", "requires_grad")

GetPayload = Callable[[agent_pb2.Payload], Buffer | DeviceBuffer]


class TableWriter:
    """Puts tensors of one message into a table."""

    def __init__(self) -> None:
        self.gathered = Gathered()
        self._positions: list[int] = []
        self._dtypes: list[agent_pb2.DType.ValueType] = []
        self._dimensions: list[int] = []
        self._sizes: list[int] = []
        self._requires_grad: list[int] = []
        self._permuted: list[int] = []
        self._strides: list[int] = []

    def take(self, tensors: Sequence[torch.Tensor], excluded: Container[int]) -> list[int]:
        """Adds the tensors that a table can have. They have to stay alive until their elements are copied.

        Args:
            tensors: all tensors of the message.
            excluded: indices of those that are not to be added.

        Returns:
            The indices of those that were not added.
        """
        others = []
        add, strided, plain, numbers = self.gathered.add, torch.strided, PLAIN_DTYPES, DTYPE_NUMBERS
        for position, tensor in enumerate(tensors):
            is_cpu, layout, dtype, is_nested, shape, requires_grad = _features(tensor)
            if (
                not is_cpu
                or layout is not strided
                or is_nested
                or dtype not in plain
                or position in excluded
                or not 0 < (nbytes := tensor.nbytes) <= MAX_GATHERED_BYTES
                or tensor.is_neg()
                or tensor.is_conj()
                or not ((is_row_major := tensor.is_contiguous()) or has_no_gaps(shape, tensor.stride()))
                # FSDP, for one, takes the memory of tensors away.
                or tensor.storage_offset() * dtype.itemsize + nbytes > tensor.untyped_storage().nbytes()
            ):
                others.append(position)
                continue
            add(tensor.data_ptr(), nbytes)
            self._positions.append(position)
            self._dtypes.append(numbers[dtype])
            self._dimensions.append(len(shape))
            self._sizes += shape
            if requires_grad:
                self._requires_grad.append(position)
            if not is_row_major:
                self._permuted.append(position)
                self._strides += tensor.stride()
        return others

    def message(self, data: agent_pb2.Payload) -> agent_pb2.Tensor:
        """Returns the message that stands for the tensors. Args: data: the payload with their elements."""
        return agent_pb2.Tensor(
            data=data,
            table=agent_pb2.TensorTable(
                positions=self._positions,
                dtypes=self._dtypes,
                dimensions=self._dimensions,
                sizes=self._sizes,
                requires_grad=self._requires_grad,
                permuted=self._permuted,
                strides=self._strides,
            ),
        )


def _check(number: agent_pb2.DType.ValueType, sizes: tuple[int, ...], dimensions: int) -> tuple[torch.dtype, int]:
    """Returns the dtype and the bytes of a tensor. Raises ValueError if it is none."""
    dtype = DTYPES_BY_NUMBER.get(number)
    if dtype not in PLAIN_DTYPES or len(sizes) != dimensions or not is_shape(sizes) or 0 in sizes:
        raise ValueError(f"malformed tensor: dtype number {number}, shape {sizes[:MAX_DIMENSIONS]}")
    return dtype, math.prod(sizes) * dtype.itemsize


def _empty_permuted(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(strides) != len(sizes) or min(strides, default=-1) < 0 or not has_no_gaps(sizes, strides):
        raise ValueError(f"malformed tensor: strides {strides} for shape {sizes}")
    return torch.empty_strided(sizes, strides, dtype=dtype)


class TableReader:
    """Takes the tensors of one message out of the payload of its table. Used by one thread."""

    def __init__(self, message: agent_pb2.Tensor, count: int, get: GetPayload) -> None:
        """Reads the payload.

        Args:
            message: the first one of the envelope, which has a table.
            count: how many tensors have messages of their own.
            get: returns the received bytes of a payload.

        Raises:
            ValueError: the message contradicts itself.
        """
        data = get(message.data)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ValueError("malformed tensors: the elements of many are in device memory")
        self._data = memoryview(data)
        self._get = get
        self._bytes_left = len(data)
        self.tensors: Mapping[int, torch.Tensor] = self._read(message.table, count)
        """Those of the table, by their positions among the tensors of the message."""

    def _read(self, table: agent_pb2.TensorTable, count: int) -> dict[int, torch.Tensor]:
        positions, requires_grad, empty = table.positions, set(table.requires_grad), torch.empty
        if len(positions) != len(table.dtypes) or len(positions) != len(table.dimensions):
            raise ValueError("malformed tensors: lists of different lengths")
        found: dict[int, torch.Tensor] = {}
        known: dict[tuple[agent_pb2.DType.ValueType, tuple[int, ...]], tuple[torch.dtype, int]] = {}
        strides = self._strides(table)
        all_sizes, limit, base = tuple(table.sizes), len(self._data), address_of(self._data)
        end = first = 0
        for position, number, dimensions in zip(positions, table.dtypes, table.dimensions, strict=True):
            sizes = all_sizes[first : first + dimensions]
            first += dimensions
            if (checked := known.get((number, sizes))) is None:
                checked = known[number, sizes] = _check(number, sizes, dimensions)
            dtype, nbytes = checked
            begin = end + -end % ALIGNMENT
            end = begin + nbytes
            if end > limit:
                raise ValueError(f"malformed tensor: bytes {begin} to {end} of {limit}")
            if strides and position in strides:
                tensor = _empty_permuted(sizes, strides[position], dtype)
            else:
                tensor = empty(*sizes, dtype=dtype) if sizes else empty((), dtype=dtype)
            copy_memory(tensor.data_ptr(), base + begin, nbytes)
            if position in requires_grad and (dtype.is_floating_point or dtype.is_complex):
                tensor.requires_grad_()
            found[position] = tensor
        if len(found) != len(positions) or any(each >= len(found) + count for each in found):
            raise ValueError("malformed tensors: their positions are not those of a list")
        self._bytes_left -= end
        return found

    @staticmethod
    def _strides(table: agent_pb2.TensorTable) -> dict[int, tuple[int, ...]]:
        """Returns the strides of the tensors that are not contiguous, by position."""
        dimensions = dict(zip(table.positions, table.dimensions, strict=True))
        found, all_strides, first = {}, tuple(table.strides), 0
        for position in table.permuted:
            count = dimensions.get(position, 0)
            found[position] = all_strides[first : first + count]
            first += count
        return found

    def get(self, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
        """Returns the bytes of a payload of another tensor, which may be a part of that of the table."""
        if not payload.HasField("gathered"):
            return self._get(payload)
        begin, nbytes = payload.gathered.offset, payload.gathered.nbytes
        self._bytes_left -= nbytes  # what several tensors named would be copied for each
        if self._bytes_left < 0 or begin + nbytes > len(self._data):
            raise ValueError(f"malformed tensor: {nbytes} bytes at {begin} of {len(self._data)}")
        return memoryview(bytearray(self._data[begin : begin + nbytes]))

    def merge(self, others: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the tensors of the message in their order, given those that are not in the table."""
        rest, found = iter(others), self.tensors
        return [found[each] if each in found else next(rest) for each in range(len(found) + len(others))]
