"""The elements of many tensors as one payload: each begins at a multiple of some bytes, one after the other."""

import ctypes
from typing import final

import numpy as np

from ...proto.v1 import agent_pb2
from .attached import ALIGNMENT

__all__ = ["Gathered", "aligned"]

_copy = ctypes.PyDLL(None).memmove  # which keeps the GIL: letting it go for each of 1,000 pieces costs more
_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype = None


def aligned(nbytes: int) -> int:
    """Returns where what follows so many bytes begins."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
        place = aligned(self.nbytes)
        self.pieces.append((place, address, nbytes))
        self.nbytes = place + nbytes
        return place

    def put(self, data: memoryview) -> agent_pb2.Payload:
        """Adds bytes, which it keeps; returns where the receiver finds them."""
        self._kept.append(data)
        place = self.add(np.frombuffer(data, np.uint8).ctypes.data, data.nbytes)
        return agent_pb2.Payload(gathered=agent_pb2.GatheredPayload(offset=place, nbytes=data.nbytes))

    def copy_to(self, target: memoryview) -> None:
        """Copies all of it to the beginning of some memory."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        for place, address, nbytes in self.pieces:
            _copy(base + place, address, nbytes)

    def joined(self) -> memoryview:
        """Returns a copy of all of it."""
        data = memoryview(bytearray(self.nbytes))
        self.copy_to(data)
        return data
