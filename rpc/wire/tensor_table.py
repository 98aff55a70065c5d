"""Many small tensors of one message as a flat table, whose elements are one payload.

A protobuf message and a payload for each of 1,000 tensors take ten times as long as copying their elements. So
one message, the first of an envelope, stands for all that are dense, contiguous, of plain dtypes and not large;
what it says of them is in lists of numbers. The others have messages of their own, and their small payloads are
parts of the same one, behind.

The receiver copies each tensor out of the payload. So a tensor that is kept keeps its own memory only.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from ...proto.v1 import agent_pb2
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.messages import Buffer
from .dtypes import DTYPE_NUMBERS, DTYPES_BY_NUMBER, PLAIN_DTYPES
from .gathered import Gathered, aligned
from .inline_tensors import plain_tensor
from .small_tensors import contiguous_address
from .strides import MAX_DIMENSIONS, is_shape

__all__ = ["MAX_GATHERED_BYTES", "MIN_TENSORS", "TableReader", "TableWriter"]

MIN_TENSORS = 4
"""Fewer tensors of a message travel one by one."""

MAX_GATHERED_BYTES = 128 << 10
"""Bytes of the largest tensor that is copied out of a payload. Larger ones stay where they are received."""

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

    def add(self, position: int, tensor: torch.Tensor) -> bool:
        """Adds a tensor, which has to stay alive until its elements are copied. Returns whether that can be.

        Args:
            position: its index among the tensors of the message.
            tensor: any tensor.
        """
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        dtype, nbytes = tensor.dtype, tensor.nbytes
        if not 0 < nbytes <= MAX_GATHERED_BYTES or dtype not in PLAIN_DTYPES:
            return False
        if not (address := contiguous_address(tensor, nbytes)):
            return False
        self.gathered.add(address, nbytes)
        self._positions.append(position)
        self._dtypes.append(DTYPE_NUMBERS[dtype])
        self._dimensions.append(tensor.dim())
        self._sizes.extend(tensor.shape)
        if tensor.requires_grad:
            self._requires_grad.append(position)
        return True

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
            ),
        )


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
        positions, requires_grad = table.positions, set(table.requires_grad)
        if len(positions) != len(table.dtypes) or len(positions) != len(table.dimensions):
            raise ValueError("malformed tensors: lists of different lengths")
        found: dict[int, torch.Tensor] = {}
        end, size, all_sizes, data = 0, 0, tuple(table.sizes), self._data
        for position, number, dimensions in zip(positions, table.dtypes, table.dimensions, strict=True):
            sizes = all_sizes[size : size + dimensions]
            size += dimensions
            dtype = DTYPES_BY_NUMBER.get(number)
            if dtype not in PLAIN_DTYPES or len(sizes) != dimensions or not is_shape(sizes):
                raise ValueError(f"malformed tensor: dtype number {number}, shape {sizes[:MAX_DIMENSIONS]}")
            begin = aligned(end)
            end = begin + math.prod(sizes) * dtype.itemsize
            if not begin < end <= len(data):
                raise ValueError(f"malformed tensor: bytes {begin} to {end} of {len(data)}")
            elements = bytearray(data[begin:end])
            found[position] = plain_tensor(elements, sizes, dtype, requires_grad=position in requires_grad)
        if len(found) != len(positions) or any(each >= len(found) + count for each in found):
            raise ValueError("malformed tensors: their positions are not those of a list")
        self._bytes_left -= end
        return found

    def get(self, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer:
        """Returns the bytes of a payload of another tensor, which may be a part of that of the table."""
        if not payload.HasField("gathered"):
            return self._get(payload)
        begin, nbytes = payload.gathered.offset, payload.gathered.nbytes
        self._bytes_left -= nbytes  # what several tensors named would be copied for each
        if self._bytes_left < 0 or begin + nbytes > len(self._data):
            raise ValueError(f"malformed tensor: {nbytes} bytes at {begin} of {len(self._data)}")
        return bytearray(self._data[begin : begin + nbytes])

    def merge(self, others: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the tensors of the message in their order, given those that are not in the table."""
        rest, found = iter(others), self.tensors
        return [found[each] if each in found else next(rest) for each in range(len(found) + len(others))]
