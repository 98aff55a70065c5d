"""Sums of gradients that arrive in parts, where a worker runs its part of a pass one root at a time."""

import threading
from collections import Counter
from typing import final

import torch

from .closure import SendId
from .compression import TensorGradients

__all__ = ["PartialGradients", "add", "total"]


def add(before: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Returns the sum of two gradients, either of which may be sparse."""
    if before.is_sparse and not more.is_sparse:
        return more + before  # torch adds sparse to dense, not the other way round
    return before + more


def total(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum of two gradients, either of which may be None."""
    if before is None or more is None:
        return before if more is None else more
    return add(before, more)


@final
class PartialGradients:
    """Sums up the gradients of received messages until all roots that depend on them have run."""

    def __init__(self, root_counts: Counter[SendId]) -> None:
        """Args: root_counts: the number of roots that depend on each message."""
        self._missing = Counter(root_counts)
        self._sums: dict[SendId, list[torch.Tensor | None]] = {}
        self._lock = threading.Lock()

    def add(self, send: SendId, gradients: TensorGradients) -> TensorGradients | None:
        """Adds the gradients that one root contributes; returns the sum after the last root, else None."""
        with self._lock:
            before = self._sums.get(send, [None] * len(gradients))
            self._sums[send] = [total(*pair) for pair in zip(before, gradients, strict=True)]
            self._missing[send] -= 1
            return None if self._missing[send] else self._sums.pop(send)
