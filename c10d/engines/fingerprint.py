"""Encodes which collective a rank calls as one integer, by which ranks notice that they call different ones."""

import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ...errors import CollectiveMismatchError
from .reductions import Reduction

__all__ = ["encode", "encode_parts", "mismatch"]

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

# From the lowest bit: operation (4 bits), reduction (4), dtype (8), root (12), size (35). In place of a root,
# reduce_scatter has a checksum of the sizes of the parts; 0 for equal parts.
_REDUCTION_SHIFT, _DTYPE_SHIFT, _ROOT_SHIFT, _SIZE_SHIFT = 4, 8, 16, 28
_ROOT_BITS, _SIZE_BITS = 12, 35

_OPERATION_CODES = {name: number for number, name in enumerate(_OPERATIONS)}
_REDUCTION_CODES = {name: number << _REDUCTION_SHIFT for number, name in enumerate(_REDUCTIONS)}
_DTYPE_CODES = {dtype: number << _DTYPE_SHIFT for number, dtype in enumerate(_DTYPES)}


def encode(
    operation: str,
    *,
    reduction: Reduction | None = None,
    dtype: torch.dtype | None = None,
    root: int = 0,
    size: int = 0,
) -> int:
    """Returns the fingerprint of a call, a non-negative integer of at most 63 bits.

    Args:
        operation: name of the operation, such as `"all_reduce"`.
        reduction: of operations that reduce.
        dtype: of the tensors, for operations that reduce; others move bytes.
        root: of operations that have one.
        size: bytes that must be the same on all ranks; counted modulo 32 GiB.
    """
    code = _OPERATION_CODES[operation] | root << _ROOT_SHIFT | (size & (1 << _SIZE_BITS) - 1) << _SIZE_SHIFT
    if reduction is not None:
        code |= _REDUCTION_CODES[reduction.name] | _DTYPE_CODES[dtype]
    return code


def encode_parts(operation: str, reduction: Reduction, parts: Sequence[Tensor]) -> int:
    """Returns the fingerprint of an operation that reduces a part for each rank; all ranks have the same sizes."""
    sizes = [part.nbytes for part in parts]
    checksum = 0 if len(set(sizes)) == 1 else zlib.crc32(repr(sizes).encode()) % (1 << _ROOT_BITS)
    return encode(operation, reduction=reduction, dtype=parts[0].dtype, root=checksum, size=sum(sizes))


def mismatch(other: int, theirs: int, me: int, own: int, expected: int) -> CollectiveMismatchError:
    """Returns the error for the call of another rank that is not what this rank expects.

    Args:
        other: the other rank, in the default group.
        theirs: the fingerprint of its call.
        me: this rank, in the default group.
        own: the fingerprint of this rank's call.
        expected: that of the other rank if the calls matched.
    """
    if _operation(theirs) == _operation(expected) == "all_to_all":
        sent, taken = theirs >> _SIZE_SHIFT, expected >> _SIZE_SHIFT
        text = f"rank {other} calls all_to_all with {sent} bytes for rank {me}, which takes {taken} bytes"
    else:
        text = f"rank {other} calls {_describe(theirs)}, but rank {me} calls {_describe(own)}"
        if expected != own:
            text += f" and expects {_describe(expected)}"
    return CollectiveMismatchError([other], text)


def _operation(fingerprint: int) -> str:
    return _OPERATIONS[fingerprint & 15]


def _describe(fingerprint: int) -> str:
    """Returns a call in words for error messages, such as `"broadcast with root 0 of 16 bytes"`."""
    operation = text = _operation(fingerprint)
    reduction = _REDUCTIONS[fingerprint >> _REDUCTION_SHIFT & 15]
    if reduction:
        dtype = _DTYPES[fingerprint >> _DTYPE_SHIFT & 255]
        text += f" ({reduction} of {str(dtype).removeprefix('torch.')})"
    if operation in {"broadcast", "reduce", "gather", "scatter"}:
        text += f" with root {fingerprint >> _ROOT_SHIFT & (1 << _ROOT_BITS) - 1}"
    if operation not in {"barrier", "all_to_all"}:
        text += f" of {fingerprint >> _SIZE_SHIFT} bytes"
    if operation == "reduce_scatter" and (checksum := fingerprint >> _ROOT_SHIFT & (1 << _ROOT_BITS) - 1):
        text += f" in unequal parts (checksum {checksum})"
    return text
