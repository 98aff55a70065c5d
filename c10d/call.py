"""One call of an operation of a process group, as all that handles it sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from .engines.base import Engine, PendingOperation
from .reductions import Reduction
from .staging import Staging

__all__ = ["CollectiveCall", "Step", "Steps"]


@final
class Step:
    """One operation of an engine, with its arguments but for the timeout."""

    __slots__ = ("_arguments", "operation")

    def __init__(self, operation: str, *arguments: object) -> None:
        self.operation = operation
        self._arguments = arguments

    def __call__(self, engine: Engine, seconds: float) -> PendingOperation | int | None:
        """Does it; see engines.base for what comes back."""
        return getattr(engine, self.operation)(*self._arguments, seconds)  # type: ignore[no-any-return]


Steps = Sequence[Callable[[Engine, float], PendingOperation | int | None]]


@final
@dataclass(slots=True, kw_only=True)  # not frozen: that would double what making one costs
class CollectiveCall:
    """What a user asked for. Nobody changes it.

    name: of the operation, as in torch.distributed, such as `"all_reduce"`.
    inputs: the user's tensors that are read.
    outputs: the user's tensors that are written.
    device: where they are; for a barrier, which engine is to do it.
    steps: do it, in this order, on an engine each within so many seconds; see engines.base.
    staging: what stands in for the user's tensors.
    result: what `Work.result()` gives.
    seconds: how long it may take; None for the group's timeout.
    now: the caller waits for it at once.
    reduction, root: of collectives that have them.
    peer: of point-to-point operations: the other rank, -1 for any.
    tag: of point-to-point operations.
    """

    name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    device: torch.device
    steps: Steps
    staging: Staging
    result: Any
    seconds: float | None = None
    now: bool = False
    reduction: Reduction | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
