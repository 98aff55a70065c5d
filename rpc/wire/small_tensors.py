"""Small tensors inside the pickle of a message.

A protobuf message of its own, with a payload, takes longer than copying the bytes a few times more. So plain ones
are pickled with their bytes: dense, on the CPU, without gradients. Those that share memory with other tensors of
the message are not, because they have to share it at the receiver too.

The pickle of a value that is one small tensor, as the results of many functions are, is put together here of the
opcodes of a call of `small_tensor`: a pickler takes twice as long to find out what to write. Python's
`pickletools` explains them.
"""

import ctypes
import functools
import math
import pickle
import struct
from typing import Any

import torch

from ...proto.v1 import agent_pb2
from .dtypes import DTYPE_NUMBERS, DTYPES_BY_NUMBER, PLAIN_DTYPES
from .strides import MAX_DIMENSIONS

__all__ = [
    "MAX_SMALL_BYTES",
    "MAX_TINY_BYTES",
    "SMALL_TENSOR_COST_BYTES",
    "contiguous_address",
    "copy_bytes",
    "pickle_small",
    "reduce_small",
    "small_address",
    "small_tensor",
]

MAX_SMALL_BYTES = 64 << 10
"""Bytes of the largest small tensor, and of all that are put into one pickle: others are copied fewer times."""

SMALL_TENSOR_COST_BYTES = 2 << 10
"""What each counts with besides its bytes: copying so many takes as long as the calls for one that is pickled."""

MAX_TINY_BYTES = 4 << 10
"""Bytes of the largest tensor that is copied into a bytes object: for more, other operations take less time."""

_SmallBytes = ctypes.c_char * MAX_SMALL_BYTES
"""One type for all sizes, because ctypes takes long to make a type."""


def small_address(tensor: torch.Tensor, max_bytes: int) -> int:
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


def reduce_small(tensor: torch.Tensor) -> tuple[int, tuple[Any, ...]] | None:
    """Returns the address of the storage of a tensor and how to pickle it; None if it is not small.

    Its class is exactly torch.Tensor. It has to stay alive until it is pickled.
    """
    address = small_address(tensor, MAX_SMALL_BYTES)
    if not address:
        return None
    data: bytes | pickle.PickleBuffer
    if (nbytes := tensor.nbytes) <= MAX_TINY_BYTES:
        data = copy_bytes(address, nbytes)
    else:  # copied by the pickler from where it is; the receiver gets a bytearray of its own
        data = pickle.PickleBuffer(memoryview(_SmallBytes.from_address(address)).cast("B")[:nbytes])
    storage = address - int(tensor.storage_offset()) * tensor.itemsize
    return storage, (small_tensor, (DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), data))


def copy_bytes(address: int, nbytes: int) -> bytes:
    """Returns what is in memory at an address."""
    if nbytes > MAX_SMALL_BYTES:
        return ctypes.string_at(address, nbytes)
    data: bytes = _SmallBytes.from_address(address)[:nbytes]  # type: ignore[assignment] # takes half as long
    return data


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
