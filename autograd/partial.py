"""Gradients that come in parts, where a worker runs its part of a pass one root at a time."""

import threading
from collections import Counter
from typing import final

import torch

from .closure import Message
from .compression import Gradients

__all__ = ["PartialGradients", "add", "total"]


def add(before: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, either of which may be sparse."""
    if before.is_sparse and not more.is_sparse:
        return more + before  # torch adds sparse to dense, not the other way round
    return before + more


def total(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, either of which may be none."""
    if before is None or more is None:
        return before if more is None else more
    return add(before, more)


@final
class PartialGradients:
    """Holds the gradients of received messages until all roots that lead to them have run."""

    def __init__(self, roots: Counter[Message]) -> None:
        """Args: roots: from how many roots each message is reached."""
        self._left = Counter(roots)
        self._sums: dict[Message, list[torch.Tensor | None]] = {}
        self._lock = threading.Lock()

    def add(self, message: Message, gradients: Gradients) -> Gradients | None:
        """Adds what a root gives; returns the sum if it was the last, else None."""
        with self._lock:
            before = self._sums.get(message, [None] * len(gradients))
            self._sums[message] = [total(*pair) for pair in zip(before, gradients, strict=True)]
            self._left[message] -= 1
            return None if self._left[message] else self._sums.pop(message)
