"""Calls a function as soon as a module has been imported, through a finder on sys.meta_path.

Uses the standard library only: sitecustomize runs this file in processes that may never import torch, so that they
have the compatibility layer installed as soon as they do.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence

__all__ = ["call_on_import"]


def call_on_import(name: str, callback: Callable[[types.ModuleType], None]) -> Callable[[], None]:
    """Calls `callback(module)` once the module `name` has been imported; at once if it has been already.

    Returns a function that removes the hook if the module has not been imported yet.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_initializing(module):
        callback(module)
        return lambda: None
    finder = _HookingFinder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _HookingFinder(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders, and makes its loader call the callback after executing it."""

    def __init__(self, name: str, callback: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of the hooked module; None for all others."""
        if fullname != self._name:
            return None
        self.remove()
        spec = _find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # the module does not exist yet; a later import may find it
            return spec
        loader, original = spec.loader, spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            original(module)
            self._callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        """Removes the hook."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _find_spec(
    fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if hasattr(finder, "find_spec") and (spec := finder.find_spec(fullname, path, target)) is not None:
            return spec
    return None


def _is_initializing(module: types.ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _install(module: object) -> None:
    # If gradwire is being imported and has imported torch, wait until the import of gradwire is done.
    if "gradwire" in sys.modules and module is not sys.modules["gradwire"]:
        return
    try:
        from gradwire import compat
        from gradwire.compat.launch import inherited_defaults
    except ModuleNotFoundError as error:
        message = (
            f"{sys.executable} was started by a program that runs on gradwire, but cannot import gradwire: "
            f"install it there, or remove {os.path.join(os.path.dirname(__file__), 'site')} from PYTHONPATH"
        )
        raise ImportError(message) from error
    compat.install(**inherited_defaults(os.environ))


if __name__ == "gradwire_startup":  # `import torch` imports torch.distributed.rpc
    for _name in ("torch", "gradwire"):
        call_on_import(_name, _install)
