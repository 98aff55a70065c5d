"""Many small tensors of one message as a table of groups, whose elements are one payload.

A protobuf message and a payload for each of 1,000 tensors take ten times as long as copying their elements. So
one message, the first of an envelope, stands for all that are dense, without gaps, of plain dtypes and not large.
A group has those of one dtype that agree in all sizes but the first one: one operation of torch concatenates them
in the payload, and one takes them apart. The other tensors have messages of their own, and their small payloads
are parts of the same one.

The receiver copies each tensor out of the payload. So a tensor that is kept keeps its own memory only.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from operator import attrgetter
from typing import Any, final

import torch

from ...proto.v1 import agent_pb2
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.messages import Buffer
from .attached import ALIGNMENT
from .dtypes import DTYPE_NUMBERS, DTYPES_BY_NUMBER, PLAIN_DTYPES
from .gathered import Gathered
from .strides import MAX_DIMENSIONS, dims_by_descending_stride, has_no_gaps

__all__ = ["MAX_GATHERED_BYTES", "MIN_TENSORS", "TableReader", "TableWriter"]

MIN_TENSORS = 4
"""Fewer tensors of a message travel one by one."""

MAX_GATHERED_BYTES = 128 << 10
"""Bytes of the largest tensor that is copied out of a payload. Larger ones stay where they are received."""

GetPayload = Callable[[agent_pb2.Payload], Buffer | DeviceBuffer]

# For `map`, which takes a third of the time of a loop in Python.
_kind = attrgetter("is_cpu", "layout", "is_nested", "dtype", "requires_grad", "shape")
_is_contiguous, _offset = torch.Tensor.is_contiguous, torch.Tensor.storage_offset
_storage, _storage_bytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


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
        """Adds the tensors that a table can have.

        Args:
            tensors: all tensors of the message.
            excluded: indices of those that are not to be added.

        Returns:
            The indices of those that were not added.
        """
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for position, kind in enumerate(map(_kind, tensors)):
            if position not in excluded:
                by_kind[kind].append(position)
        groups: dict[Any, _Rows] = defaultdict(_Rows)
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
                    groups[dtype, requires_grad, shape[1:]].add(found, alike, shape[0])
                else:
                    self._add(found, [each.view(1) for each in alike], ())
        for (_, _, sizes), each in groups.items():
            self._add(each.positions, each.tensors, sizes, rows=each.counts)
        return [position for position in range(len(tensors)) if position not in self._added]

    def _add_permuted(
        self, positions: list[int], tensors: list[torch.Tensor], nbytes: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Adds those of some tensors of one shape that are permuted, without gaps in their memory.

        Returns:
            The positions of those that are contiguous, and these.
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
        """Adds a group of contiguous tensors.

        Args:
            positions: of the tensors in the message.
            tensors: have the shape `sizes`; with rows, these sizes after the first dimension.
            sizes: see there.
            rows: the size of the first dimension of each.
            order: how the dimensions of all were permuted to make them contiguous.
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


@final
class _Rows:
    """Contiguous tensors that agree in all but the size of their first dimension."""

    __slots__ = ("counts", "positions", "tensors")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.counts: list[int] = []
        """The sizes of their first dimensions."""

    def add(self, positions: list[int], tensors: list[torch.Tensor], count: int) -> None:
        """Adds tensors of one shape, whose first dimension has size `count`."""
        self.positions += positions
        self.tensors += tensors
        self.counts += [count] * len(positions)


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
