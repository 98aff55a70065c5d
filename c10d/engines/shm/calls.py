"""What a rank calls, as one number: ranks whose numbers differ do not fit together."""

from typing import Final

import torch

from ...reductions import Reduction

__all__ = ["describe", "encode"]

_OPERATIONS: Final = (
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
_REDUCTIONS: Final = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_DTYPES: Final = (
    None,
    *sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str),
)

_OPERATION = {name: number for number, name in enumerate(_OPERATIONS)}
_REDUCTION = {name: number << 4 for number, name in enumerate(_REDUCTIONS)}
_DTYPE = {dtype: number << 8 for number, dtype in enumerate(_DTYPES)}

_ROOT_BITS, _SIZE_BITS = 12, 35
_ROOT_AT, _SIZE_AT = 16, 28


def encode(
    operation: str,
    *,
    reduction: Reduction | None = None,
    dtype: torch.dtype | None = None,
    root: int = 0,
    size: int = 0,
) -> int:
    """The number, which fits into 63 bits.

    reduction, dtype: of reductions.
    root: of operations that have one.
    size: bytes that all ranks must agree on; those above 32 GiB count modulo that.
    """
    number = _OPERATION[operation] | root << _ROOT_AT | (size & (1 << _SIZE_BITS) - 1) << _SIZE_AT
    if reduction is not None:
        number |= _REDUCTION[reduction.name] | _DTYPE[dtype]
    return number


def describe(number: int) -> str:
    """What the number says, for people."""
    operation = _OPERATIONS[number & 15]
    text = operation
    reduction, dtype = _REDUCTIONS[number >> 4 & 15], _DTYPES[number >> 8 & 255]
    if reduction:
        text += f" ({reduction} of {str(dtype).removeprefix('torch.')})"
    if operation in {"broadcast", "reduce", "gather", "scatter"}:
        text += f" with root {number >> _ROOT_AT & (1 << _ROOT_BITS) - 1}"
    if operation not in {"barrier", "all_to_all"}:
        text += f" of {number >> _SIZE_AT} bytes"
    return text
