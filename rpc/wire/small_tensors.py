"""Small tensors inside the pickle of a message.

A protobuf message of its own, with a payload, takes longer than copying the bytes a few times more. So plain ones
are pickled with their bytes: dense, on the CPU, without gradients. Those that share memory with other tensors of
the message are not, because they have to share it at the receiver too.
"""

import ctypes
import math
import pickle
from typing import Any

import torch

from ...proto.v1 import agent_pb2
from .dtypes import DTYPE_NUMBERS, DTYPES_BY_NUMBER, PLAIN_DTYPES
from .strides import MAX_DIMENSIONS

__all__ = [
    "MAX_SMALL_BYTES",
    "MAX_TINY_BYTES",
    "address_of",
    "copy_bytes",
    "is_in_order",
    "is_small",
    "reduce_small",
    "small_tensor",
]

MAX_SMALL_BYTES = 64 << 10
"""Bytes of the largest small tensor, and of a pickle that small tensors are still put into."""

MAX_TINY_BYTES = 4 << 10
"""Bytes of the largest tensor that is put into any pickle. Many larger ones are copied fewer times beside it."""

_SmallBytes = ctypes.c_char * MAX_SMALL_BYTES
"""One type for all sizes, because ctypes takes long to make a type."""


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of the memory that a dense tensor on the CPU is in; 0 if it has none."""
    address: int = tensor.data_ptr()
    return address and address - int(tensor.storage_offset()) * tensor.itemsize


def is_small(tensor: torch.Tensor, pickled_bytes: int) -> bool:
    """Returns whether `reduce_small` shall pickle a tensor.

    Args:
        tensor: a tensor of exactly the class torch.Tensor.
        pickled_bytes: bytes of the pickle so far.
    """
    if not tensor.is_cpu or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    nbytes = tensor.nbytes
    most = MAX_SMALL_BYTES if pickled_bytes < MAX_SMALL_BYTES else MAX_TINY_BYTES
    if not 0 < nbytes <= most or tensor.dtype not in PLAIN_DTYPES:
        return False
    return not tensor.is_nested and is_in_order(tensor, nbytes)


def is_in_order(tensor: torch.Tensor, nbytes: int) -> bool:
    """Returns whether the elements of a plain tensor are in memory as they are sent: in row-major order."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    # FSDP, for one, takes the memory of tensors away.
    end = tensor.storage_offset() * tensor.itemsize + nbytes
    return end <= tensor.untyped_storage().nbytes() and tensor.data_ptr() != 0


def reduce_small(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns how to pickle a small tensor, which has to stay alive until it is pickled."""
    data: bytes | pickle.PickleBuffer
    if (nbytes := tensor.nbytes) <= MAX_TINY_BYTES:
        data = copy_bytes(tensor)
    else:  # copied by the pickler from where it is; the receiver gets a bytearray of its own
        data = pickle.PickleBuffer(memoryview(_SmallBytes.from_address(tensor.data_ptr())).cast("B")[:nbytes])
    return small_tensor, (DTYPE_NUMBERS[tensor.dtype], tuple(tensor.shape), data)


def copy_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor for which `is_in_order` is true."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def small_tensor(
    dtype_number: agent_pb2.DType.ValueType, sizes: tuple[int, ...], data: bytes | bytearray
) -> torch.Tensor:
    """Returns a tensor that has been pickled with its bytes; a bytearray becomes its memory.

    Raises:
        ValueError: the bytes contradict the shape.
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
