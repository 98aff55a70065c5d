"""Maps dtypes and reductions to the numbers that NCCL has for them, and says which ones NCCL supports.

The numbers are those of `ncclDataType_t` and `ncclRedOp_t` in nccl.h, which are stable. Tensors that NCCL cannot
reduce are gathered by NCCL and combined by torch (plans.py).
"""

from dataclasses import dataclass
from typing import Final, final

import torch

from ..reductions import Reduction

__all__ = ["BYTES", "NativeReduction", "NcclCapability"]

BYTES: Final = 1
"""ncclUint8, the datatype of operations that only move data."""

_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_FLOAT8 = {torch.float8_e4m3fn: 10, torch.float8_e5m2: 11}
_REAL_DTYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)
_OPERATIONS = {"sum": _SUM, "premul_sum": _SUM, "product": _PRODUCT, "max": _MAX, "min": _MIN, "avg": _AVG}
_BOOL_OPERATIONS = {"sum": _MAX, "max": _MAX, "bor": _MAX, "product": _MIN, "min": _MIN, "band": _MIN}
"""For bools, which are reduced as bytes that are 0 or 1."""


@final
@dataclass(frozen=True, slots=True)
class NativeReduction:
    """A reduction as NCCL computes it.

    datatype: NCCL's number of the dtype.
    operation: NCCL's number of the reduction.
    width: how many numbers make an element, 2 for complex dtypes.
    """

    datatype: int
    operation: int
    width: int = 1


@final
@dataclass(frozen=True, slots=True)
class NcclCapability:
    """The version of NCCL and the GPU, which decide what NCCL can reduce.

    version: of NCCL, such as 22703 for 2.27.3.
    compute_capability: of the GPU, such as `(9, 0)`.
    """

    version: int
    compute_capability: tuple[int, int]

    def native(self, dtype: torch.dtype, reduction: Reduction) -> NativeReduction | None:
        """Returns how NCCL computes a reduction of a dtype; None if it cannot.

        The factor of a premultiplied sum must have been applied before.
        """
        name = reduction.name
        if dtype == torch.bool:
            return NativeReduction(BYTES, _BOOL_OPERATIONS[name]) if name in _BOOL_OPERATIONS else None
        if name not in _OPERATIONS:
            return None
        if dtype in _REAL_DTYPES:
            sums = name in {"sum", "premul_sum", "avg"}
            return NativeReduction(_DTYPES[_REAL_DTYPES[dtype]], _OPERATIONS[name], 2) if sums else None
        if dtype in _FLOAT8:
            # NCCL has these since 2.24, for Hopper and later. For averages it would divide before it sums, with
            # three bits of precision.
            is_supported = self.version >= 22400 and self.compute_capability >= (9, 0) and name != "avg"
            return NativeReduction(_FLOAT8[dtype], _OPERATIONS[name]) if is_supported else None
        return NativeReduction(_DTYPES[dtype], _OPERATIONS[name]) if dtype in _DTYPES else None
