"""The names under which calls are counted: bounded in number and length, and safe to show."""

from collections.abc import Callable
from typing import Any, final

from ..net.peer_text import printable
from ..rpc.calls.sending import name_of
from ..rpc.contracts.messages import CALL, MessageType
from ..rpc.contracts.worker import WorkerInfo
from ..rref.methods import method_of_call
from ..torch_internals import find_builtin

__all__ = ["FUNCTION_KINDS", "OPERATIONS", "OTHER", "Names", "function_name", "operation_key"]

OTHER = "other"
"""The function, and the worker, of calls beyond the bound."""

METHOD = "RRef"
"""Stands in the names of calls of methods of values, whose class the caller need not know."""

FUNCTION_KINDS = frozenset({CALL, MessageType.RREF_CREATE, MessageType.STREAM_OPEN})
"""The types of messages whose value begins with a function."""

OPERATIONS = {
    MessageType.RREF_CREATE: "remote",
    MessageType.RREF_FETCH: "to_here",
    MessageType.STREAM_OPEN: "rpc_stream",
}
"""What users call to send messages of these types."""


def operation_key(kind: MessageType.ValueType, value: Any) -> tuple[MessageType.ValueType, str | None, Any]:
    """Returns what tells calls of one function from those of others: cheap, and the same for equal functions.

    Args:
        kind: of the message.
        value: what it carries: for a call, a tuple that begins with the function.
    """
    if kind in FUNCTION_KINDS:
        function = value[0]
        if (method := method_of_call(value)) is not None:
            return kind, METHOD, method
        try:
            return kind, function.__module__, function.__qualname__
        except AttributeError:  # such as a ScriptFunction, or an instance with __call__
            return kind, None, type(function)
    return kind, None, None


@final
class Names:
    """The functions and workers that are counted by themselves."""

    def __init__(self, limit: int) -> None:
        """Args: limit: how many functions, and how many workers."""
        self._limit = limit
        self._functions: set[str] = set()
        self._workers: set[str] = set()

    def of(self, kind: MessageType.ValueType, value: Any, worker: WorkerInfo) -> tuple[str, str]:
        """Returns the names of the function, or else the operation, of a message and of a worker."""
        name = OPERATIONS.get(kind) or MessageType.Name(kind).lower()
        if kind in FUNCTION_KINDS:
            method = method_of_call(value)
            function = function_name(value[0]) if method is None else f"{METHOD}.{method}"
            name = function if kind == CALL else f"{name} {function}"
        return self._bounded(self._functions, printable(name)), self._bounded(
            self._workers, printable(worker.name)
        )

    def _bounded(self, names: set[str], name: str) -> str:
        if name in names:
            return name
        if len(names) >= self._limit:
            return OTHER
        names.add(name)
        return name


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function with that of its module, or that of torch for one of its operators."""
    builtin: str | None = find_builtin(function)
    if builtin is not None:
        return builtin
    module = getattr(function, "__module__", None)
    name = name_of(function)
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name
