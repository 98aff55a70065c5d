"""The names of called functions, in spans and profiles."""

from typing import Any, NamedTuple, final

import torch

from ..net.peer_text import printable
from ..rpc.contracts.messages import MessageType
from ..rref.methods import method_of_call
from ..view.names import FUNCTION_KINDS, OPERATIONS, function_name, operation_key

__all__ = ["Method", "MethodNames"]

MAX_NAMES = 1 << 12
"""Functions whose names are kept, so that they need not be made again."""


class Method(NamedTuple):
    """What a call does.

    name: the module and the name of the function; of a method of a remote value, its name only, as the class is
        not known to the caller.
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
        """Returns the method of a message of this kind, whose value begins with a function if it is a call."""
        key = operation_key(kind, value)
        if kind in FUNCTION_KINDS and key[1] is None:
            return _method(kind, value)  # one type for many functions
        method = self._known.get(key)
        if method is None:
            method = _method(kind, value)
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            self._known[key] = method
        return method


def _method(kind: MessageType.ValueType, value: Any) -> Method:
    operation = OPERATIONS.get(kind, "call" if kind == MessageType.CALL else MessageType.Name(kind).lower())
    if kind not in FUNCTION_KINDS:
        return Method(operation, operation)
    if (method := method_of_call(value)) is not None:
        return Method(printable(method), "method of a value")
    function = value[0]
    function = getattr(function, "func", function)  # a policy guards functions by partial ones
    if isinstance(function, torch.jit.ScriptFunction):
        return Method(function.qualified_name.removeprefix("__torch__."), operation)
    return Method(printable(function_name(function)), operation)
