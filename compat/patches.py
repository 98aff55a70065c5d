"""Monkey patches that can be undone, including names that other modules have imported."""

import sys
import types
from collections.abc import Iterator, Mapping
from typing import final

__all__ = ["Patches"]

_ABSENT = object()
_OWN_PACKAGE = __name__.partition(".")[0]
_SHARED_TYPES = (type(None), bool, int, float, str, bytes, tuple, types.ModuleType)
"""Types whose values are shared between unrelated names, so identity does not show which name was imported."""


@final
class Patches:
    """Attributes of modules and classes that are replaced until `undo`.

    `patch` replaces attributes. A module that ran `from torch.distributed.rpc import rpc_sync` has a name of its
    own for the original function, so `patch_importers` also rebinds, by identity, the globals of all modules that
    refer to a replaced object. References inside functions, classes and containers are not changed.
    """

    def __init__(self) -> None:
        self._undo_log: list[tuple[types.ModuleType | type, str, object, object]] = []
        """Owner, name, original (or _ABSENT) and replacement, in the order of patching."""
        self._replacements: dict[int, tuple[object, object]] = {}
        """Original and replacement, by the id of the original."""

    def patch(self, owner: types.ModuleType | type, replacements: Mapping[str, object]) -> None:
        """Sets attributes of a module or class, existing and new ones."""
        for name, replacement in replacements.items():
            original = vars(owner).get(name, _ABSENT)
            if original is replacement:
                continue
            self._set(owner, name, replacement)
            if original is not _ABSENT and not isinstance(original, _SHARED_TYPES):
                self._replacements[id(original)] = (original, replacement)

    def patch_importers(self) -> None:
        """Rebinds the globals of all modules outside this package that refer to a replaced object."""
        for module in _other_modules():
            for name, value in list(vars(module).items()):
                original, replacement = self._replacements.get(id(value), (None, None))
                if original is not None:
                    self._set(module, name, replacement)

    def undo(self) -> None:
        """Restores all attributes and globals, except those that have been changed again since they were patched.

        A module that was imported in between has imported the replacements. If it is torch's, it gets the
        originals. Others keep the replacements, since nothing shows where they imported them from.
        """
        originals: dict[tuple[str, int], object] = {}
        while self._undo_log:
            owner, name, original, replacement = self._undo_log.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
                originals[name, id(replacement)] = original
        for module in filter(_is_torch, _other_modules()):
            for name, value in list(vars(module).items()):
                if (name, id(value)) in originals:
                    setattr(module, name, originals[name, id(value)])
        self._replacements.clear()

    def _set(self, owner: types.ModuleType | type, name: str, replacement: object) -> None:
        self._undo_log.append((owner, name, vars(owner).get(name, _ABSENT), replacement))
        setattr(owner, name, replacement)


def _other_modules() -> Iterator[types.ModuleType]:
    """Yields all imported modules except gradwire's."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _OWN_PACKAGE and isinstance(module, types.ModuleType):
            yield module


def _is_torch(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "torch"
