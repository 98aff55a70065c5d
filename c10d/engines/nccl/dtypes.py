"""How NCCL numbers dtypes and reductions, and which it can compute.

The numbers are those of `ncclDataType_t` and `ncclRedOp_t` in nccl.h; they do not change. What NCCL does not
reduce is gathered and combined by torch (plans.py).
"""

from dataclasses import dataclass
from typing import Final, final

import torch

from ...reductions import Reduction

__all__ = ["BYTES", "Ability", "Native"]

BYTES: Final = 1
"""ncclUint8: what is only moved, is moved as bytes."""

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
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)
_OPERATIONS = {"sum": _SUM, "premul_sum": _SUM, "product": _PRODUCT, "max": _MAX, "min": _MIN, "avg": _AVG}
_OF_BOOLS = {"sum": _MAX, "max": _MAX, "bor": _MAX, "product": _MIN, "min": _MIN, "band": _MIN}
"""On bytes that are 0 or 1."""


@final
@dataclass(frozen=True, slots=True)
class Native:
    """How NCCL is told to reduce: numbers of dtype and operation, and how many numbers make an element."""

    datatype: int
    operation: int
    width: int = 1


@final
@dataclass(frozen=True, slots=True)
class Ability:
    """What NCCL can do on some GPU.

    version: of NCCL, such as 22703.
    capability: of the GPU, such as (9, 0).
    """

    version: int
    capability: tuple[int, int]

    def native(self, dtype: torch.dtype, reduction: Reduction) -> Native | None:
        """How it reduces this dtype so; None if it does not. Factors must have been applied before."""
        name = reduction.name
        if dtype == torch.bool:
            return Native(BYTES, _OF_BOOLS[name]) if name in _OF_BOOLS else None
        if name not in _OPERATIONS:
            return None
        if dtype in _PARTS:
            sums = name in {"sum", "premul_sum", "avg"}
            return Native(_DTYPES[_PARTS[dtype]], _OPERATIONS[name], 2) if sums else None
        if dtype in _FLOAT8:
            # Since 2.24, and compiled for Hopper and later. Averages would be divided before they are summed, in
            # three bits of precision.
            able = self.version >= 22400 and self.capability >= (9, 0) and name != "avg"
            return Native(_FLOAT8[dtype], _OPERATIONS[name]) if able else None
        return Native(_DTYPES[dtype], _OPERATIONS[name]) if dtype in _DTYPES else None
