"""One call of a collective or point-to-point operation, in the form that groups, engines and recorders share."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from .base import Engine, PendingOperation
from .reductions import Reduction
from .staging import Staging

__all__ = ["ANY_RANK", "CallOptions", "CollectiveCall", "Step", "Steps", "call_options"]

ANY_RANK: Final = -1
"""The peer of a receive that accepts a message from any rank, as in torch and in MPI's MPI_ANY_SOURCE."""

_ZERO = timedelta(0)


@final
class Step:
    """One operation of an engine and its arguments, except the timeout.

    operation: name of a method of Engine.
    """

    __slots__ = ("_arguments", "operation")

    def __init__(self, operation: str, *arguments: object) -> None:
        self.operation = operation
        self._arguments = arguments

    def __call__(self, engine: Engine, timeout_s: float) -> PendingOperation | int | None:
        """Calls the operation on an engine and returns what it returns; see engines.base."""
        return getattr(engine, self.operation)(*self._arguments, timeout_s)  # type: ignore[no-any-return]


Steps = Sequence[Callable[[Engine, float], PendingOperation | int | None]]
"""Functions that each run one operation on an engine, within a timeout in seconds; usually instances of Step."""


class CallOptions(NamedTuple):
    """What the caller of an operation may choose for any operation.

    timeout_s: seconds the operation may take; None for the group's timeout.
    is_sync: whether the caller waits for the operation at once.
    """

    timeout_s: float | None = None
    is_sync: bool = False


def call_options(torch_options: Any, timeout: timedelta | None) -> CallOptions:
    """Reads timeout and `asyncOp` from an options object of torch, such as AllreduceOptions.

    Args:
        torch_options: torch's options, or the single argument that torch accepts in their place; None for none.
        timeout: takes precedence over the timeout of the options, if given.
    """
    limit = getattr(torch_options, "timeout", None) if timeout is None else timeout
    # torch's options without a timeout have a negative one.
    timeout_s = limit.total_seconds() if limit is not None and limit > _ZERO else None
    return CallOptions(timeout_s, not getattr(torch_options, "asyncOp", True))


@final
class CollectiveCall:
    """A checked call of one operation. Nobody changes it after it is made.

    name: the operation's name in torch.distributed, such as `"all_reduce"`.
    steps: carry out the operation on an engine, in this order.
    staging: the tensors that the engine reads and writes in place of the user's.
    inputs: the user's tensors that are read.
    outputs: the user's tensors that are written.
    options: timeout, and whether the caller waits.
    device: the tensors' device; for a barrier, the device whose engine runs it.
    result: what `Work.result()` returns.
    reduction, root: of collectives that have them; else None.
    peer: the other rank of a point-to-point operation, or ANY_RANK; None for collectives.
    tag: of point-to-point operations.
    """

    def __init__(
        self,
        name: str,
        steps: Steps,
        staging: Staging,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        options: CallOptions,
        *,
        device: torch.device | None = None,
        result: Any = None,
        reduction: Reduction | None = None,
        root: int | None = None,
        peer: int | None = None,
        tag: int = 0,
    ) -> None:
        """By default `device` is that of the first input or output, and `result` is the list of outputs."""
        self.name = name
        self.steps = steps
        self.staging = staging
        self.inputs = inputs
        self.outputs = outputs
        self.options = options
        self.device = (inputs or outputs)[0].device if device is None else device
        self.result = list(outputs) if result is None else result
        self.reduction = reduction
        self.root = root
        self.peer = peer
        self.tag = tag
