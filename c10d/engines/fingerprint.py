"""Encodes which collective a rank calls as one integer, by which ranks notice that they call different ones."""

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

from ...errors import CollectiveMismatchError
from .base import Engine, Pending, Tensors
from .reductions import Reduction

__all__ = ["AgreeingEngine", "encode", "encode_parts", "mismatch", "operation_of"]

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
    size: int = 0,
    *,
    root: int = 0,
    reduction: Reduction | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Returns the fingerprint of a call, a non-negative integer of at most 63 bits.

    `size` is in bytes that must be the same on all ranks, counted modulo 32 GiB. `dtype` is that of tensors that
    are reduced; other operations move bytes.
    """
    code = _OPERATION_CODES[operation] | root << _ROOT_SHIFT | (size & (1 << _SIZE_BITS) - 1) << _SIZE_SHIFT
    if reduction is not None:
        code |= _REDUCTION_CODES[reduction.name] | _DTYPE_CODES[dtype]
    return code


def encode_parts(reduction: Reduction, parts: Tensors) -> int:
    """Returns the fingerprint of a reduce_scatter of a part for each rank; all ranks have the same sizes."""
    sizes = [part.nbytes for part in parts]
    checksum = 0 if len(set(sizes)) == 1 else zlib.crc32(repr(sizes).encode()) % (1 << _ROOT_BITS)
    return encode("reduce_scatter", sum(sizes), root=checksum, reduction=reduction, dtype=parts[0].dtype)


class AgreeingEngine(Engine):
    """An engine on a library that takes the sizes which this rank gives for those of the other ranks.

    If these differ, Gloo and MPI write wrong numbers, read memory that nobody has written, wait for ever, or end
    the process. So the ranks compare their calls of a collective before they send its data.
    """

    posts_receives: ClassVar[bool] = True

    operation = ""
    """The collective that was agreed on last."""

    timeout = 0.0
    """Seconds that it may take."""

    def agree(self, timeout: float, call: int | Sequence[int], expected: Sequence[int] | None = None) -> None:
        """Waits until all ranks have called a collective, and compares the calls.

        Args:
            timeout: seconds that the other ranks may take.
            call: fingerprint of this rank's call, or those for each of the ranks.
            expected: the fingerprint that each rank must have for this one; if None, that of this rank's call.

        Raises CollectiveMismatchError if a rank has made another call.
        """
        given = [call] * self.size if isinstance(call, int) else list(call)
        self.operation, self.timeout = operation_of(given[0]), timeout
        if self.size == 1:
            return
        wanted = given if expected is None else list(expected)
        sent = torch.tensor(given)
        received = torch.empty_like(sent)
        self.exchange_fingerprints(received, sent)
        found = received.tolist()
        if found != wanted:
            rank = next(rank for rank in range(self.size) if found[rank] != wanted[rank])
            ranks = self._setup.global_ranks
            raise mismatch(ranks[rank], found[rank], ranks[self.rank], given[rank], wanted[rank])

    @abstractmethod
    def exchange_fingerprints(self, received: Tensor, sent: Tensor) -> None:
        """Sends element i of `sent` to rank i, and waits until `received` has those of all ranks for this one."""

    def barrier(self, timeout: float) -> Pending:
        """Waits until all ranks agree that this is a barrier."""
        self.agree(timeout, encode("barrier"))
        return None

    def can_send(self, tensor: Tensor, peer: int) -> bool:  # noqa: ARG002
        """Returns True: the library sends by itself."""
        return True


def mismatch(other: int, theirs: int, me: int, own: int, expected: int) -> CollectiveMismatchError:
    """Returns the error for a call of `other` that this rank, `me`, does not expect; both are global ranks."""
    if operation_of(theirs) == operation_of(expected) == "all_to_all":
        sent, taken = theirs >> _SIZE_SHIFT, expected >> _SIZE_SHIFT
        text = f"rank {other} calls all_to_all with {sent} bytes for rank {me}, which takes {taken} bytes"
    else:
        text = f"rank {other} calls {_describe(theirs)}, but rank {me} calls {_describe(own)}"
        if expected != own:
            text += f" and expects {_describe(expected)}"
    return CollectiveMismatchError([other], text)


def operation_of(fingerprint: int) -> str:
    """Returns the name of the operation that a fingerprint is of."""
    return _OPERATIONS[fingerprint & 15]


def _describe(fingerprint: int) -> str:
    """Returns a call in words for error messages, such as `"broadcast with root 0 of 16 bytes"`."""
    operation = text = operation_of(fingerprint)
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
