"""The elements of many tensors as one payload: in groups, each of which begins at a multiple of some bytes."""

from typing import final

import numpy as np
import torch

from ...proto.v1 import agent_pb2
from .attached import ALIGNMENT

__all__ = ["Gathered", "address_of"]

_address = torch.Tensor.data_ptr


def address_of(data: memoryview) -> int:
    """Returns where bytes are, which somebody has to keep alive."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@final
class Gathered:
    """What is copied into one payload, from where it is now."""

    __slots__ = ("_groups", "_parts", "nbytes")

    def __init__(self) -> None:
        self._groups: list[tuple[int, list[torch.Tensor], int]] = []
        """Tensors, their place in the payload, and the number of their elements."""
        self._parts: list[tuple[int, memoryview]] = []
        """Other bytes, and theirs."""
        self.nbytes = 0
        """Bytes of the payload so far."""

    def add(self, tensors: list[torch.Tensor], count: int) -> None:
        """Adds the elements of tensors, whose place the receiver knows.

        Args:
            tensors: of one dtype and, except for the first dimension, of the same sizes. They must not change
                before they are copied.
            count: the number of their elements.
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
