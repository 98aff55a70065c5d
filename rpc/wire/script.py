"""TorchScript functions and modules in messages.

A script function is sent by name if it can be imported by its name, else with its code. Modules are always sent
with their code.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from ...errors import RpcError
from ...torch_internals import load_script, save_script

__all__ = ["not_scriptable", "reduce_script_function", "reduce_script_module"]

F = TypeVar("F", bound=Callable[..., Any])

_PREFIX = "__torch__."


def not_scriptable(function: F) -> F:
    """Decorates a function so that `torch.jit.script` refuses code that calls it, with an error that says why."""

    def refuse() -> NoReturn:
        raise RpcError(
            f"{function.__name__} cannot be called from inside TorchScript (torch.jit is deprecated): make the "
            "call in Python, and send the script function"
        )

    function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return function


def reduce_script_function(function: Any) -> tuple[Any, ...]:
    """Returns how to pickle a `torch.jit.ScriptFunction`, as `__reduce__` does."""
    module, _, name = function.qualified_name.removeprefix(_PREFIX).rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return _import, (module, name)
    return load_script, (save_script(function),)


def reduce_script_module(module: Any) -> tuple[Any, ...]:
    """Returns how to pickle a scripted module with its code, parameters and buffers, as `__reduce__` does."""
    return load_script, (save_script(module),)


def _import(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
