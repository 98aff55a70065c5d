"""Autograd contexts and passes with the methods, and the refusals, of torch's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import autograd
from ..autograd.context import Context, current_context, set_current_context
from ..autograd.engine import check_roots
from ..autograd.extension import Autograd
from ..errors import AutogradError, GradwireError, RemoteError
from ..rpc.contracts.agent import current_agent

__all__ = [
    "NODE_METHODS",
    "DistAutogradContext",
    "backward",
    "context",
    "current",
    "greatest_id",
    "is_valid",
    "new",
    "release",
    "retrieve",
]


class DistAutogradContext:
    """What torch's callers see of this worker's part of a context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        return self._context.reached

    def _send_functions(self) -> dict[tuple[int, int], Any]:
        return self._context.send_nodes

    def _recv_functions(self) -> dict[tuple[int, int], Any]:
        return self._context.receive_nodes


@contextmanager
def context() -> Iterator[int]:
    """A forward pass and its backward passes. Yields the context's id.

    Raises:
        AutogradError: this thread is in a context already. gradwire's own contexts may stand inside each other.
    """
    opened = new()
    try:
        yield opened._context_id()
    finally:
        release(opened._context_id())


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Computes the gradients of the sum of roots with respect to all leaves, on whatever workers they are.

    Raises:
        TypeError: the arguments are of other types.
        AutogradError: the roots cannot be differentiated. Other than with gradwire, a leaf cannot be.
        RuntimeError: what any worker raised, with that worker's id.
    """
    if not isinstance(context_id, int) or not _are_tensors(roots):
        raise TypeError(
            "backward(): incompatible function arguments: it takes (context_id: int, roots: list[torch.Tensor], "
            f"retain_graph: bool = False), and was given {context_id!r}, {roots!r}"
        )
    check_roots(roots)
    for index, root in enumerate(roots):
        if root.grad_fn is None:
            raise AutogradError(f"roots[{index}] does not have a valid gradient function: it is a leaf")
    try:
        with torch.profiler.record_function("torch::distributed::autograd::backward"):
            autograd.backward(context_id, roots, retain_graph)
    except GradwireError:
        raise
    except Exception as error:
        cause = error.__cause__
        agent = current_agent()
        worker = agent.worker(cause.worker) if isinstance(cause, RemoteError) else agent.info
        raise RuntimeError(f"Error on Node {worker.id}: {error}") from error


def _are_tensors(roots: object) -> bool:
    return isinstance(roots, list | tuple) and all(isinstance(root, torch.Tensor) for root in roots)


def _name_of_node(self: Any) -> str:
    return f"torch::distributed::autograd::{type(self).__name__}"


NODE_METHODS = {"name": _name_of_node}
"""What torch's callers find at the nodes that `DistAutogradContext` gives, by name."""


def new() -> DistAutogradContext:
    """Opens a context and makes it this thread's.

    Raises:
        AutogradError: this thread has one.
    """
    if (present := current_context()) is not None:
        raise AutogradError(f"Already have an autograd context id for this thread: {present.id}")
    opened = current_agent().extension(Autograd).contexts.open()
    set_current_context(opened)
    return DistAutogradContext(opened)


def release(context_id: int) -> None:
    """Ends a context, on all workers that it has reached."""
    present = current_context()
    if present is not None and present.id == context_id:
        set_current_context(None)
    current_agent().extension(Autograd).contexts.release(context_id)


def current() -> DistAutogradContext:
    """This thread's context. Raises AutogradError if it is in none."""
    present = current_context()
    if present is None:
        raise AutogradError("this thread is in no autograd context: open one by `with autograd.context()`")
    return DistAutogradContext(present)


def retrieve(context_id: int) -> DistAutogradContext:
    """This worker's part of a context. Raises UnknownContextError."""
    return DistAutogradContext(current_agent().extension(Autograd).contexts.get(context_id))


def greatest_id() -> int:
    """The greatest id that a context of this worker can have: 48 bits count, and those above name the worker."""
    return (current_agent().info.id + 1 << 48) - 1


def is_valid(context_id: int) -> None:
    """Raises UnknownContextError if this worker has no such context."""
    retrieve(context_id)
