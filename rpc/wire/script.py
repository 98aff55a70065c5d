"""TorchScript functions and modules in messages.

A script function goes by name where it has one that can be imported, else with its code, as modules do.
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
    """Has `torch.jit.script` refuse what calls this function, with an error that says why."""

    def refuse() -> NoReturn:
        raise RpcError(
            f"{function.__name__} cannot be called from inside TorchScript (torch.jit is deprecated): make the "
            "call in Python, and send the script function"
        )

    function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return function


def reduce_script_function(function: Any) -> tuple[Any, ...]:
    """How to pickle a `torch.jit.ScriptFunction`."""
    module, _, name = function.qualified_name.removeprefix(_PREFIX).rpartition(".")
    if getattr(sys.modules.get(module), name, None) is function:
        return _named, (module, name)
    return _load, (save_script(function),)


def reduce_script_module(module: Any) -> tuple[Any, ...]:
    """How to pickle a scripted module: with code, parameters and buffers."""
    return _load, (save_script(module),)


def _load(data: bytes) -> Any:
    return load_script(data)


def _named(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
