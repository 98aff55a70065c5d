"""Presents tensors to MPI as numbers that it can reduce."""

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ..memory import as_bytes, flat
from ..reductions import Reduction, finish, prepare

__all__ = ["Reducible", "share_memory"]

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}
"""Dtypes that MPI has no type for, and those in which they are reduced."""

_OPS = {
    "sum": "SUM",
    "avg": "SUM",
    "premul_sum": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}

_BOOL_OPS = {**_OPS, "sum": "BOR", "product": "BAND"}
"""For bools, which are reduced as bytes that are 0 or 1."""


@final
@dataclass(slots=True)
class Reducible:
    """A tensor as numbers that MPI can reduce.

    numbers: one of MPI's dtypes; shares the tensor's memory or is a copy.
    wide: the copy in a wider dtype; None if there is none.
    is_bool: whether the numbers are bytes that represent bools.
    """

    numbers: Tensor
    wide: Tensor | None
    is_bool: bool

    @classmethod
    def of(cls, tensor: Tensor, reduction: Reduction) -> "Reducible":
        """Multiplies the tensor by the reduction's factor, if there is one, and returns it as numbers."""
        prepare(reduction, tensor)
        if tensor.dtype in _WIDER:
            wide = flat(tensor).to(_WIDER[tensor.dtype])
            return cls(wide, wide, is_bool=False)
        if tensor.dtype == torch.bool:
            return cls(as_bytes(tensor), None, is_bool=True)
        return cls(tensor, None, is_bool=False)

    def spec(self, mpi: Any) -> list[Any]:
        """Describes the numbers to mpi4py, in the module `mpi`; the description does not keep them alive."""
        numbers, dtype = self.numbers, self.numbers.dtype
        kind = "c" if dtype.is_complex else "f" if dtype.is_floating_point else "i" if dtype.is_signed else "u"
        buffer = mpi.buffer.fromaddress(numbers.data_ptr(), numbers.nbytes)
        return [buffer, mpi.Datatype.fromcode(f"{kind}{dtype.itemsize}")]

    def op(self, mpi: Any, reduction: Reduction) -> Any:
        """Returns MPI's operator for a reduction of the numbers."""
        return getattr(mpi, (_BOOL_OPS if self.is_bool else _OPS)[reduction.name])

    def write_result(self, tensor: Tensor, reduction: Reduction, ranks: int) -> None:
        """Writes the numbers, which MPI has reduced over `ranks` ranks, to the tensor that this was made of."""
        if self.wide is None:
            finish(reduction, tensor, ranks)
        else:
            finish(reduction, self.wide, ranks)
            tensor.view(-1).copy_(self.wide)


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Returns whether two contiguous tensors share memory."""
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes and other < start + first.nbytes
