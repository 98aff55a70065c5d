"""Checks the limits of an MPI library: counts are below 2**31 before MPI 4.0, and tags have an upper bound."""

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

from ....errors import UnsupportedOperationError
from ..pending import CombinedOperation, PendingOperation

__all__ = ["MpiLimits", "start_in_pieces"]

MAX_COUNT = 2**31 - 1
"""Largest count of elements before MPI 4.0, whose counts have 64 bits."""

PIECE_BYTES = 2**30
"""Bytes of the pieces that larger tensors are divided into."""


@final
class MpiLimits:
    """The limits of an MPI library, and of mpi4py."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._max_tag: Final = comm.Get_attr(mpi.TAG_UB)
        self._has_large_counts = min(mpi.VERSION, mpi.Get_version()[0]) >= 4

    def is_too_large(self, count: int) -> bool:
        """Returns whether a count is too large for one call."""
        return count > MAX_COUNT and not self._has_large_counts

    def check_count(self, operation: str, count: int) -> None:
        """Raises UnsupportedOperationError if a count is too large for one call."""
        if self.is_too_large(count):
            major, minor = self._mpi.Get_version()
            raise UnsupportedOperationError(
                "mpi",
                operation,
                f"MPI {major}.{minor} counts to {MAX_COUNT} only, and this takes {count}: use smaller tensors, an "
                "MPI 4.0 such as the mpich wheel, or another engine",
            )

    def check_tag(self, operation: str, tag: int) -> None:
        """Raises UnsupportedOperationError if MPI does not have a tag."""
        if not 0 <= tag <= self._max_tag:
            raise UnsupportedOperationError(
                "mpi", operation, f"the tag is {tag}, but MPI has only tags from 0 to {self._max_tag}"
            )


def start_in_pieces(tensor: Tensor, start: Callable[[Tensor], PendingOperation | None]) -> PendingOperation:
    """Starts an operation for each piece of `PIECE_BYTES` bytes of a tensor, and returns all as one operation."""
    pieces = torch.split(tensor.view(-1), PIECE_BYTES // tensor.itemsize)
    started = [start(piece) for piece in pieces]
    return CombinedOperation([pending for pending in started if pending is not None])
