"""The names of called functions, in statistics, spans and profiles: bounded in length, and safe to show."""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch

from ..net.peer_text import printable
from ..rpc.calls.sending import name_of
from ..rpc.contracts.messages import CALL, MessageType
from ..rref.rref import method_of_call
from ..torch_internals import find_builtin

__all__ = ["FUNCTION_KINDS", "METHOD_CALL", "OPERATIONS", "Method", "MethodNames"]

MAX_NAMES = 1 << 12
"""Functions whose names are kept, so that they need not be made again."""

METHOD_CALL = "method of a value"
"""The operation of calls of methods of values, whose class the caller need not know."""

FUNCTION_KINDS = frozenset({CALL, MessageType.RREF_CREATE, MessageType.STREAM_OPEN})
"""The types of messages whose value begins with a function."""

OPERATIONS = {
    CALL: "call",
    MessageType.RREF_CREATE: "remote",
    MessageType.RREF_FETCH: "to_here",
    MessageType.STREAM_OPEN: "rpc_stream",
}
"""What users call to send messages of these types."""


class Method(NamedTuple):
    """What a call does.

    name: the module and the name of the function; of a method of a value, its name only.
    operation: the kind of call, such as "remote".
    """

    name: str
    operation: str


@final
class MethodNames:
    """The methods of calls, by what tells them apart. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[Any, Method] = {}

    def of(self, kind: MessageType.ValueType, value: Any) -> Method:
        """Returns the method of a call.

        Args:
            kind: of the message.
            value: what it carries: for a call, a tuple that begins with the function and its positional arguments.
        """
        key: tuple[Any, ...] = (kind,)
        method = None
        if kind in FUNCTION_KINDS:
            method, function = method_of_call(value), value[0]
            try:
                key = (kind, function.__module__, function.__qualname__) if method is None else (kind, method)
            except AttributeError:  # such as a ScriptFunction, or an instance with __call__
                return _describe(kind, value, method)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            found = self._known[key] = _describe(kind, value, method)
        return found


def _describe(kind: MessageType.ValueType, value: Any, method: str | None) -> Method:
    operation = OPERATIONS.get(kind) or MessageType.Name(kind).lower()
    if kind not in FUNCTION_KINDS:
        return Method(operation, operation)
    if method is not None:
        return Method(printable(method), METHOD_CALL)
    function = value[0]
    function = getattr(function, "func", function)  # a policy guards functions by partial ones
    if isinstance(function, torch.jit.ScriptFunction):
        return Method(function.qualified_name.removeprefix("__torch__."), operation)
    return Method(printable(_function_name(function)), operation)


def _function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function with that of its module, or that of torch for one of its operators."""
    builtin: str | None = find_builtin(function)
    if builtin is not None:
        return builtin
    module = getattr(function, "__module__", None)
    name = name_of(function)
    return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name
