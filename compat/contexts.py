"""Autograd contexts with the methods of torch's."""

from ..autograd.context import Context, current_context, set_current_context
from ..autograd.extension import Autograd
from ..errors import AutogradError
from ..rpc.agent import current_agent

__all__ = ["DistAutogradContext", "current", "greatest_id", "is_valid", "new", "release", "retrieve"]


class DistAutogradContext:
    """What torch's callers see of this worker's part of a context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id


def new() -> DistAutogradContext:
    """Opens a context and makes it this thread's.

    Raises:
        AutogradError: this thread has one.
    """
    if current_context() is not None:
        raise AutogradError("this thread is in an autograd context already")
    context = current_agent().extension(Autograd).contexts.open()
    set_current_context(context)
    return DistAutogradContext(context)


def release(context_id: int) -> None:
    """Ends a context, on all workers that it has reached."""
    context = current_context()
    if context is not None and context.id == context_id:
        set_current_context(None)
    current_agent().extension(Autograd).contexts.release(context_id)


def current() -> DistAutogradContext:
    """This thread's context. Raises AutogradError if it is in none."""
    context = current_context()
    if context is None:
        raise AutogradError("this thread is in no autograd context: open one by `with autograd.context()`")
    return DistAutogradContext(context)


def retrieve(context_id: int) -> DistAutogradContext:
    """This worker's part of a context. Raises UnknownContextError."""
    return DistAutogradContext(current_agent().extension(Autograd).contexts.get(context_id))


def greatest_id() -> int:
    """The greatest id that a context of this worker can have: 48 bits count, and those above name the worker."""
    return (current_agent().info.id + 1 << 48) - 1


def is_valid(context_id: int) -> None:
    """Raises UnknownContextError if this worker has no such context."""
    retrieve(context_id)
