"""Backward passes across workers: the names of `torch.distributed.autograd`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch

from ..rpc.contracts.agent import current_agent
from .context import inside
from .engine import Mode, check_roots
from .extension import Autograd

__all__ = ["backward", "context", "get_gradients"]

MODES = get_args(Mode)


@contextmanager
def context() -> Iterator[int]:
    """A forward pass and its backward passes, on all workers that calls in this block reach.

        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    Calls that this thread makes in the block belong to the context, and so do the calls that the called
    functions make. At its end the context is cleaned up on all workers it has reached.

    Yields:
        The context's id.

    Raises:
        NotInitializedError: RPC is not initialized.
    """
    contexts = current_agent().extension(Autograd).contexts
    opened = contexts.open()
    try:
        with inside(opened):
            yield opened.id
    finally:
        contexts.release(opened.id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    mode: Mode = "smart",
    timeout: float = 0.0,
) -> None:
    """Computes the gradients of the sum of roots with respect to all leaves, on whatever workers they are.

    They are added up in the context, on the worker of each leaf, and touch no `.grad`.

    Args:
        context_id: what `context()` yielded.
        roots: scalar tensors on this worker that require grad.
        retain_graph: keep what another pass over the same graph needs.
        mode: "smart" runs what the roots depend on. "fast" waits, as torch does, for the gradients of all messages
            of the context, for ever if the roots do not depend on one of them, and asks who has sent any.
        timeout: seconds that the pass may take on each worker, 0 for any.

    Raises:
        ValueError: another mode, or a negative timeout.
        UnknownContextError: no such context.
        AutogradError: the roots cannot be differentiated.
        RpcTimeoutError: the pass took longer; the message names which gradients are missing.
        Exception: the first error of any worker; the pass has ended everywhere.
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
    """The gradients that a context has accumulated for leaves of this worker, by leaf.

    Raises:
        UnknownContextError: no such context.
    """
    return current_agent().extension(Autograd).contexts.get(context_id).gradients.get()
