"""The elements of many tensors as one payload: each begins at a multiple of some bytes, one after the other."""

import ctypes
from typing import final

import numpy as np

from ...proto.v1 import agent_pb2
from .attached import ALIGNMENT

__all__ = ["ALIGNMENT", "Gathered", "address_of", "copy_memory"]

copy_memory = ctypes.PyDLL(None).memmove
"""Copies bytes: to an address, from an address, how many. It keeps the GIL, as letting go of it takes longer."""
copy_memory.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy_memory.restype = None


def address_of(data: memoryview) -> int:
    """Returns where bytes are, which somebody has to keep alive."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


@final
class Gathered:
    """What is copied into one payload, from where it is now."""

    __slots__ = ("_kept", "nbytes", "pieces")

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        """For each: its place in the payload, its address, and its bytes."""
        self._kept: list[memoryview] = []
        self.nbytes = 0
        """Bytes of the payload so far."""

    def add(self, address: int, nbytes: int) -> int:
        """Adds what is at an address, which has to stay there until it is copied. Returns its place."""
        end = self.nbytes
        place = end + -end % ALIGNMENT
        self.pieces.append((place, address, nbytes))
        self.nbytes = place + nbytes
        return place

    def put(self, data: memoryview) -> agent_pb2.Payload:
        """Adds bytes, which it keeps; returns where the receiver finds them."""
        self._kept.append(data)
        place = self.add(address_of(data), data.nbytes)
        return agent_pb2.Payload(gathered=agent_pb2.GatheredPayload(offset=place, nbytes=data.nbytes))

    def copy_to(self, target: memoryview) -> None:
        """Copies all of it to the beginning of some memory."""
        base = address_of(target)
        for place, address, nbytes in self.pieces:
            copy_memory(base + place, address, nbytes)

    def joined(self) -> memoryview:
        """Returns a copy of all of it."""
        data = memoryview(bytearray(self.nbytes))
        self.copy_to(data)
        return data
