"""Doing something when a module is imported.

Needs the standard library only, and is loaded by path in processes that may never import torch.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[types.ModuleType], None]) -> Callable[[], None]:
    """Calls `action(module)` as soon as a module is imported: now, if it is already.

    Returns:
        What takes the order back.
    """
    module = sys.modules.get(name)
    if module is not None and not _is_initializing(module):
        action(module)
        return lambda: None
    watcher = _Watcher(name, action)
    sys.meta_path.insert(0, watcher)
    return watcher.stop


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and lets its loader call the action."""

    def __init__(self, name: str, action: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, if it is the one."""
        if fullname != self._name:
            return None
        self.stop()
        spec = next(
            (
                found
                for finder in sys.meta_path
                if hasattr(finder, "find_spec") and (found := finder.find_spec(fullname, path, target)) is not None
            ),
            None,
        )
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # not there yet: go on waiting
            return spec
        loader, load = spec.loader, spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            load(module)
            self._action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def stop(self) -> None:
        """Waits no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _is_initializing(module: types.ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)
