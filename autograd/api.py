"""Backward passes across workers: the names of `torch.distributed.autograd`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..rpc.agent import current_agent
from .context import current_context, set_current_context
from .engine import check_roots
from .extension import Autograd

__all__ = ["backward", "context", "get_gradients"]


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
    before = current_context()
    set_current_context(opened)
    try:
        yield opened.id
    finally:
        set_current_context(before)
        contexts.release(opened.id)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Computes the gradients of the sum of roots with respect to all leaves, on whatever workers they are.

    They are added up in the context, on the worker of each leaf, and touch no `.grad`.

    Args:
        context_id: what `context()` yielded.
        roots: scalar tensors on this worker that require grad.
        retain_graph: keep what another pass over the same graph needs.

    Raises:
        UnknownContextError: no such context.
        AutogradError: the roots cannot be differentiated.
        Exception: the first error of any worker; the pass has ended everywhere.
    """
    autograd = current_agent().extension(Autograd)
    found = autograd.contexts.get(context_id)
    check_roots(roots)
    autograd.engine.backward(found, roots, retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that a context has accumulated for leaves of this worker, by leaf.

    Raises:
        UnknownContextError: no such context.
    """
    return current_agent().extension(Autograd).contexts.get(context_id).gradients()
