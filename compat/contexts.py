"""Autograd contexts and backward passes with the methods and the restrictions of torch's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import autograd
from ..autograd.contexts import Context
from ..autograd.engine import check_roots
from ..autograd.extension import Autograd
from ..errors import AutogradError, GradwireError, RemoteError
from ..rpc.contracts.agent import current_agent

__all__ = [
    "DistAutogradContext",
    "backward",
    "check_valid",
    "context",
    "current",
    "max_id",
    "new",
    "release",
    "retrieve",
]


class DistAutogradContext:
    """This worker's part of an autograd context, with the methods of torch's class."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        return set(self._context.exchanged()[2])

    def _send_functions(self) -> dict[tuple[int, int], Any]:
        return self._context.send_nodes

    def _recv_functions(self) -> dict[tuple[int, int], Any]:
        return self._context.receive_nodes


@contextmanager
def context() -> Iterator[int]:
    """Context manager that opens an autograd context and yields its id. Unlike gradwire's, it does not nest."""
    opened = new()
    try:
        yield opened._context_id()
    finally:
        release(opened._context_id())


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Runs a pass: see `gradwire.autograd.backward`.

    Raises:
        TypeError: an argument has the wrong type.
        AutogradError: a root cannot be differentiated. This includes leaves, which gradwire itself accepts.
        RuntimeError: an operation failed in the backward pass; the message begins with its worker's id.
    """
    are_tensors = isinstance(roots, list | tuple) and all(isinstance(root, torch.Tensor) for root in roots)
    if not isinstance(context_id, int) or not are_tensors:
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
        raise RuntimeError(f"Error on Node {worker.wire_id}: {error}") from error


def new() -> DistAutogradContext:
    """Opens a context and makes it this thread's current one. Raises AutogradError if the thread has one."""
    if (present := Context.current()) is not None:
        raise AutogradError(f"Already have an autograd context id for this thread: {present.id}")
    opened = current_agent().extension(Autograd).contexts.open()
    Context.set_current(opened)
    return DistAutogradContext(opened)


def release(context_id: int) -> None:
    """Releases a context on all workers that take part in it."""
    present = Context.current()
    if present is not None and present.id == context_id:
        Context.set_current(None)
    current_agent().extension(Autograd).contexts.release(context_id)


def current() -> DistAutogradContext:
    """Returns this thread's current context. Raises AutogradError if there is none."""
    present = Context.current()
    if present is None:
        raise AutogradError("this thread has no autograd context: open one with `with autograd.context()`")
    return DistAutogradContext(present)


def retrieve(context_id: int) -> DistAutogradContext:
    """Returns this worker's part of a context. Raises UnknownContextError."""
    return DistAutogradContext(current_agent().extension(Autograd).contexts.get(context_id))


def max_id() -> int:
    """Returns the largest id of a context of this worker: 48 bits for the count, the worker id above them."""
    return (current_agent().info.wire_id + 1 << 48) - 1


def check_valid(context_id: int) -> None:
    """Raises UnknownContextError if this worker has no such context."""
    retrieve(context_id)
