"""Plain tensors whose elements are in the envelope: the straight way for most messages that carry tensors.

Nothing is chosen here, and nothing looked up: `tensors` has what all other tensors need.
"""

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch

from ...proto.v1 import agent_pb2
from .dtypes import DTYPE_NUMBERS, DTYPES_BY_NUMBER, NUMPY_DTYPES, PLAIN_DTYPES
from .small_tensors import contiguous_address, copy_bytes
from .strides import MAX_DIMENSIONS, is_shape

__all__ = ["decode_inline", "encode_inline", "plain_tensor"]

_MAX_DIMENSIONS = slice(MAX_DIMENSIONS + 1)


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
