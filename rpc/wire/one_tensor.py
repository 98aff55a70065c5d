"""The pickles of values that are one small tensor, as the results of many functions are.

A pickler takes twice as long to find out what to write. So their opcodes are put together here: those of a call of
`small_tensor`, which any unpickler reads. Python's `pickletools` explains them.
"""

import functools
import struct

import torch

from .dtypes import DTYPE_NUMBERS
from .small_tensors import MAX_TINY_BYTES, copy_bytes, small_address, small_tensor

__all__ = ["pickle_small"]


def _short_text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


_PROTOCOL_5 = b"\x80\x05"
_STACK_GLOBAL = b"\x93"
_CALLEE = _PROTOCOL_5 + _short_text(small_tensor.__module__) + _short_text(small_tensor.__name__) + _STACK_GLOBAL
_BININT1 = b"K"
_BININT = b"J"
_MARK = b"("
_TUPLE = b"t"
_BINBYTES = b"B"
_CALL = b"\x87R."  # TUPLE3, REDUCE, STOP

_UINT32 = struct.Struct("<I")


def pickle_small(tensor: torch.Tensor) -> bytes | None:
    """Returns the pickle of a tensor of exactly the class torch.Tensor; None if the pickler has to make it."""
    address = small_address(tensor, MAX_TINY_BYTES)
    if not address:
        return None
    nbytes = tensor.nbytes
    return _up_to_data(tensor.dtype, tensor.shape, nbytes) + copy_bytes(address, nbytes) + _CALL


@functools.lru_cache(maxsize=1024)
def _up_to_data(dtype: torch.dtype, sizes: torch.Size, nbytes: int) -> bytes:
    """Returns what comes before the bytes of a tensor."""
    number = _BININT1 + bytes([DTYPE_NUMBERS[dtype]])
    shape = b"".join((_MARK, *(_BININT + _UINT32.pack(size) for size in sizes), _TUPLE))
    return _CALLEE + number + shape + _BINBYTES + _UINT32.pack(nbytes)
