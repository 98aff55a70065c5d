"""Reductions: what they are called, which dtypes allow them, and how one process computes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

__all__ = ["Reduction", "combine", "finish", "prepare"]

_NAMES = {
    int(getattr(ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """How tensors are put together.

    name: `"sum"`, `"avg"`, `"product"`, `"min"`, `"max"`, `"band"`, `"bor"`, `"bxor"` or `"premul_sum"`.
    factor: of premul_sum: what each rank's tensor is multiplied with first; a number or a tensor of one element.
    """

    name: str
    factor: float | Tensor | None = None

    @staticmethod
    def of(op: Any) -> "Reduction":
        """That of a torch.distributed.ReduceOp."""
        reduction = _PLAIN[int(getattr(op, "op", op))]
        return Reduction("premul_sum", op.__getstate__()[1]) if reduction.name == "premul_sum" else reduction

    def refuses(self, dtype: torch.dtype) -> str | None:
        """Why tensors of this dtype cannot be reduced so; None if they can."""
        floating = dtype.is_floating_point or dtype.is_complex
        if self.name in {"band", "bor", "bxor"} and floating:
            return "bits of integers and bools can be combined, those of other numbers cannot"
        if self.name in {"min", "max", "product"} and dtype.is_complex:
            return "complex numbers have no order, and torch refuses their products"
        if self.name in {"avg", "premul_sum"} and dtype == torch.bool:
            return "bools have no average and no multiples"
        if self.name == "premul_sum" and not floating:
            return "the products need not be integers"
        if dtype.is_floating_point and dtype.itemsize == 1 and dtype not in _FLOAT8:
            return "numbers of this format cannot be added"
        return None


_PLAIN = {number: Reduction(name) for number, name in _NAMES.items()}
"""Made once: this is asked for with every call."""

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
"""torch computes little with these. Sums, products and bits are the same on the signed integers of their size."""

_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Where their order is the same."""


def combine(reduction: Reduction, first: Tensor, second: Tensor, out: Tensor) -> None:
    """`out` becomes the reduction of two tensors of its shape and dtype; it may be one of them."""
    function, dtype = _FUNCTIONS[reduction.name], out.dtype
    if dtype in _SIGNED:
        if reduction.name not in {"min", "max"}:
            signed = _SIGNED[dtype]
            function(first.view(signed), second.view(signed), out=out.view(signed))
        elif dtype in _WIDER:
            wider = _WIDER[dtype]
            out.copy_(function(first.to(wider), second.to(wider)))
        else:  # with the highest bit turned over, signed integers are ordered as unsigned ones
            turn = torch.iinfo(torch.int64).min
            turned = function(first.view(torch.int64) ^ turn, second.view(torch.int64) ^ turn)
            torch.bitwise_xor(turned, turn, out=out.view(torch.int64))
    elif dtype.is_floating_point and dtype.itemsize == 1:
        out.copy_(function(first.float(), second.float()))
    else:
        function(first, second, out=out)


def prepare(reduction: Reduction, tensor: Tensor) -> None:
    """What each rank does to its tensor before it is combined with the others'."""
    if reduction.factor is not None:
        tensor.copy_(tensor * reduction.factor)


def finish(reduction: Reduction, tensor: Tensor, size: int) -> None:
    """What is done to the combination of `size` tensors. Averages of integers are rounded towards zero."""
    if reduction.name != "avg":
        return
    dtype = tensor.dtype
    if dtype == torch.complex32:  # which torch does not divide
        tensor.copy_(tensor.to(torch.complex64) / size)
    elif dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        tensor.div_(size)
    elif dtype.is_floating_point:
        tensor.copy_(tensor.float() / size)
    elif dtype in _WIDER:
        tensor.copy_(tensor.to(_WIDER[dtype]).div_(size, rounding_mode="trunc"))
    elif dtype in _SIGNED:  # which numpy divides
        numbers = tensor.numpy()
        numbers //= size
    else:
        tensor.div_(size, rounding_mode="trunc")
