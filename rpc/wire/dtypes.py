"""The dtypes of tensors in messages: their numbers, and which are copied as others."""

import torch

from ...proto.v1 import agent_pb2

__all__ = ["CARRIER_DTYPES", "DTYPES_BY_NUMBER", "DTYPE_NUMBERS", "INTEGER_DTYPES", "NUMPY_DTYPES", "PLAIN_DTYPES"]

DTYPE_NUMBERS: dict[torch.dtype, agent_pb2.DType.ValueType] = {
    getattr(torch, name.lower()): agent_pb2.DType.Value(name)
    for name in agent_pb2.DType.keys()  # noqa: SIM118 - no dictionary
    if hasattr(torch, name.lower())
}
DTYPES_BY_NUMBER = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}

INTEGER_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""Quantized dtypes, and the dtypes of their integers."""

CARRIER_DTYPES = INTEGER_DTYPES | {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for dtype, number in DTYPE_NUMBERS.items()
    if agent_pb2.FLOAT4_E2M1FN_X2 <= number <= agent_pb2.UINT7
}
"""Dtypes whose tensors torch cannot copy, and dtypes of the same size as which their elements are copied."""

NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)
"""The most frequent dtypes that numpy has too."""

PLAIN_DTYPES = DTYPE_NUMBERS.keys() - CARRIER_DTYPES.keys()
"""Dtypes whose elements are copied as they are."""
