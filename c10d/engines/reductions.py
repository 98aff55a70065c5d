"""Reductions: their names, the dtypes that they support, and how one process computes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

__all__ = ["Reduction", "combine", "combine_all", "finish", "prepare", "prepared"]

_NAMES = {
    int(getattr(ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction of tensors to one.

    name: `"sum"`, `"avg"`, `"product"`, `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"` or `"premul_sum"`.
    factor: for premul_sum: each rank's tensor is multiplied by it first; a number or a tensor of one element.
    """

    name: str
    factor: float | Tensor | None = None

    @staticmethod
    def of(op: Any) -> "Reduction":
        """Returns the reduction of a torch.distributed.ReduceOp."""
        reduction = _PLAIN[int(getattr(op, "op", op))]
        return Reduction("premul_sum", op.__getstate__()[1]) if reduction.name == "premul_sum" else reduction

    def unsupported_reason(self, dtype: torch.dtype) -> str | None:
        """Returns why tensors of this dtype cannot be reduced this way; None if they can."""
        floating = dtype.is_floating_point or dtype.is_complex
        if self.name in {"band", "bor", "bxor"} and floating:
            return "bitwise reductions are for integers and bools only"
        if self.name in {"min", "max", "product"} and dtype.is_complex:
            return "complex numbers have no order, and torch does not support their products"
        if self.name in {"avg", "premul_sum"} and dtype == torch.bool:
            return "bools cannot be averaged or multiplied by a factor"
        if self.name == "premul_sum" and not floating:
            return "the product of an integer and the factor may not be an integer"
        if dtype.is_floating_point and dtype.itemsize == 1 and dtype not in _FLOAT8:
            return "torch cannot add numbers of this format"
        return None


_PLAIN = {number: Reduction(name) for number, name in _NAMES.items()}
"""By the number of torch's operation. Made once, since every call needs one."""

_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes on which sums, products and bits are the same, for dtypes that torch hardly computes with."""

_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Wider signed dtypes, on which the order is the same too."""


def combine(reduction: Reduction, first: Tensor, second: Tensor, out: Tensor) -> None:
    """Reduces two tensors into `out`, which has their shape and dtype and may be one of them.

    avg and premul_sum add here; `prepare` and `finish` do the rest.
    """
    function, dtype = _FUNCTIONS[reduction.name], out.dtype
    if dtype in _SIGNED:
        if reduction.name not in {"min", "max"}:
            signed = _SIGNED[dtype]
            function(first.view(signed), second.view(signed), out=out.view(signed))
        elif dtype in _WIDER:
            wider = _WIDER[dtype]
            out.copy_(function(first.to(wider), second.to(wider)))
        else:  # with the highest bit flipped, signed integers are ordered as unsigned ones
            highest = torch.iinfo(torch.int64).min
            flipped = function(first.view(torch.int64) ^ highest, second.view(torch.int64) ^ highest)
            torch.bitwise_xor(flipped, highest, out=out.view(torch.int64))
    elif dtype.is_floating_point and dtype.itemsize == 1:
        out.copy_(function(first.float(), second.float()))
    else:
        function(first, second, out=out)


def prepare(reduction: Reduction, tensor: Tensor) -> None:
    """Multiplies a rank's tensor by the factor of premul_sum, in place, before it is combined with others."""
    if reduction.factor is not None:
        tensor.copy_(tensor * reduction.factor)


def prepared(reduction: Reduction, tensor: Tensor) -> Tensor:
    """Returns the tensor multiplied by the factor of premul_sum; a copy, unless there is no factor."""
    if reduction.factor is None:
        return tensor
    tensor = tensor.clone()
    prepare(reduction, tensor)
    return tensor


def combine_all(reduction: Reduction, parts: Sequence[Tensor] | Tensor, out: Tensor) -> None:
    """Reduces the prepared tensors of all ranks, or the rows of one tensor, in their order into `out`."""
    out.copy_(parts[0])
    for part in parts[1:]:
        combine(reduction, out, part, out)
    finish(reduction, out, len(parts))


def finish(reduction: Reduction, tensor: Tensor, size: int) -> None:
    """Divides the sum of `size` tensors in place, for avg. Averages of integers are rounded towards zero."""
    if reduction.name != "avg":
        return
    dtype = tensor.dtype
    if dtype == torch.complex32:  # torch does not divide it
        tensor.copy_(tensor.to(torch.complex64) / size)
    elif dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        tensor.div_(size)
    elif dtype.is_floating_point:
        tensor.copy_(tensor.float() / size)
    elif dtype in _WIDER:
        tensor.copy_(tensor.to(_WIDER[dtype]).div_(size, rounding_mode="trunc"))
    elif dtype in _SIGNED:  # torch does not divide it, numpy does
        numbers = tensor.numpy()
        numbers //= size
    else:
        tensor.div_(size, rounding_mode="trunc")
