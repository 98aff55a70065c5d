"""One call of a collective or point-to-point operation, in the form that groups, engines and recorders share."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor

from .base import Engine, PendingOperation
from .reductions import Reduction
from .staging import Staging

__all__ = ["ANY_RANK", "CollectiveCall", "step_of"]

ANY_RANK: Final = -1
"""The peer of a receive that accepts a message from any rank, as in torch and in MPI's MPI_ANY_SOURCE."""

_ZERO = timedelta(0)

Step: TypeAlias = Callable[[Engine, float], PendingOperation | int | None]
"""Runs one operation on an engine, within a timeout in seconds. Returns what the operation returns."""


def step_of(operation: str, *arguments: object) -> Step:
    """Returns the step that calls a method of Engine with these arguments, and the timeout."""

    def run(engine: Engine, timeout_s: float) -> PendingOperation | int | None:
        return getattr(engine, operation)(*arguments, timeout_s)  # type: ignore[no-any-return]

    return run


@final
class CollectiveCall:
    """A checked call of one operation. Nobody changes it after it is made.

    name: the operation's name in torch.distributed, such as `"all_reduce"`.
    steps: carry out the operation on an engine, in this order.
    staging: the tensors that the engine reads and writes in place of the user's.
    inputs: the user's tensors that are read.
    outputs: the user's tensors that are written.
    timeout_s: seconds that the operation may take; None for the group's timeout.
    is_sync: whether the caller waits for the operation at once.
    device: the tensors' device; for a barrier, the device whose engine runs it.
    result: what `Work.result()` returns.
    reduction, root: of collectives that have them; else None.
    peer: the other rank of a point-to-point operation, or ANY_RANK; None for collectives.
    tag: of point-to-point operations.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Step],
        staging: Staging,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        options: Any = None,
        timeout: timedelta | None = None,
        *,
        device: torch.device | None = None,
        result: Any = None,
        reduction: Reduction | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int = 0,
    ) -> None:
        """By default `device` is that of the first input or output, and `result` is the list of outputs.

        The options are torch's, such as AllreduceOptions, or the single argument that torch accepts in their
        place. A timeout that is given takes precedence over theirs.
        """
        self.name = name
        self.steps = steps
        self.staging = staging
        self.inputs = inputs
        self.outputs = outputs
        limit = getattr(options, "timeout", None) if timeout is None else timeout
        # torch's options without a timeout have a negative one.
        self.timeout_s = limit.total_seconds() if limit is not None and limit > _ZERO else None
        self.is_sync = not getattr(options, "asyncOp", True)
        self.device = (inputs or outputs)[0].device if device is None else device
        self.result = list(outputs) if result is None else result
        self.reduction = reduction
        self.root = root
        self.peer = peer
        self.tag = tag
