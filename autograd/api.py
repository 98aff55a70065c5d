"""The functions of `torch.distributed.autograd`: contexts, backward passes and their gradients."""

import math
from collections.abc import Sequence
from typing import final, get_args

import torch

from ..rpc.contracts.agent import current_agent
from .context import Context
from .contexts import Contexts
from .engine import Mode, check_roots
from .extension import Autograd

__all__ = ["backward", "context", "get_gradients"]

MODES = get_args(Mode)


@final
class context:  # noqa: N801 - a context manager, used like a function
    """Context manager for a forward pass and its backward passes, on all workers that its calls reach.

        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Calls that this thread, or this asyncio task, makes inside belong to the context, and so do those of the called
    functions, and of tasks and callbacks that are made inside. At its end the context is released on all workers
    that it has reached.

    It gives the id of the context. Entering it raises NotInitializedError if RPC is not initialized.
    """

    __slots__ = ("_before", "_contexts", "_opened")

    _contexts: Contexts
    _opened: Context
    _before: Context | None

    def __enter__(self) -> int:
        self._contexts = current_agent().extension(Autograd).contexts
        self._opened = self._contexts.open()
        self._before = Context.current()
        Context.set_current(self._opened)
        return self._opened.id

    def __exit__(self, *_: object) -> None:
        Context.set_current(self._before)
        self._contexts.release(self._opened.id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    mode: Mode = "smart",
    timeout: float = 0.0,
) -> None:
    """Computes the gradients of the sum of the roots with respect to all leaves, on all workers.

    The gradients are accumulated in the context, on the worker of each leaf. No `.grad` is changed.

    Args:
        context_id: what `context()` yielded.
        roots: scalar tensors on this worker that require grad.
        retain_graph: keep the graph for further passes over it.
        mode: "smart" runs what the roots depend on. "fast" does as torch: it waits for the gradients of all
            messages of the context, for ever if the roots do not depend on one of them. It asks all workers what
            they have sent.
        timeout: seconds that the pass may take on each worker, 0 for no timeout.

    Raises:
        ValueError: the mode is unknown, or the timeout negative.
        UnknownContextError: there is no such context.
        AutogradError: the roots cannot be differentiated.
        RpcTimeoutError: the pass took longer; the message names the gradients that are missing.
        Exception: the first error on any worker; the pass has ended on all of them.
    """
    autograd = current_agent().extension(Autograd)
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}: give one of {', '.join(map(repr, MODES))}")
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout!r}: give seconds, or 0 for no timeout")
    found = autograd.contexts.get(context_id)
    check_roots(roots)
    autograd.engine.backward(found, roots, retain_graph=retain_graph, mode=mode, timeout=timeout)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Returns the gradients that a context has accumulated for the leaves of this worker, by leaf.

    Raises:
        UnknownContextError: there is no such context.
    """
    return current_agent().extension(Autograd).contexts.get(context_id).gradients.get()
