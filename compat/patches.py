"""Putting objects in the place of others, wherever those are named, and back again."""

import sys
import types
from collections.abc import Iterator, Mapping
from typing import final

__all__ = ["Patches"]

_ABSENT = object()
_OWN = __name__.partition(".")[0]
_NAMELESS = (type(None), bool, int, float, str, bytes, tuple, types.ModuleType)
"""Values that may well be the same object by chance."""


@final
class Patches:
    """Names of torch's modules that mean something else for a while.

    A module that said `from torch.distributed.rpc import rpc_sync` has a name of its own for the function. So a
    replaced object is looked for in all modules there are, by identity. Names inside of functions,
    classes and containers stay what they are.
    """

    def __init__(self) -> None:
        self._before: list[tuple[types.ModuleType | type, str, object, object]] = []
        self._instead: dict[int, tuple[object, object]] = {}

    def replace(self, owner: types.ModuleType | type, names: Mapping[str, object]) -> None:
        """Gives names of a module or a class a new meaning, new names included."""
        for name, new in names.items():
            old = vars(owner).get(name, _ABSENT)
            if old is new:
                continue
            self._set(owner, name, new)
            if old is not _ABSENT and not isinstance(old, _NAMELESS):
                self._instead[id(old)] = (old, new)

    def spread(self) -> None:
        """Gives the new meaning to all names, in all modules, of what has been replaced."""
        for module in _modules():
            for name, value in list(vars(module).items()):
                old, new = self._instead.get(id(value), (None, None))
                if old is not None:
                    self._set(module, name, new)

    def undo(self) -> None:
        """Gives all names their old meaning, but for those that somebody has changed since.

        Modules of torch that were imported meanwhile are put right too. Other modules that were imported
        meanwhile keep the new objects, since nothing tells where they have them from.
        """
        meanings: dict[tuple[str, int], object] = {}
        while self._before:
            owner, name, old, new = self._before.pop()
            if vars(owner).get(name) is not new:
                continue
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
                meanings[name, id(new)] = old
        for module in _modules():
            for name, value in list(vars(module).items()) if _is_torch(module) else []:
                if (name, id(value)) in meanings:
                    setattr(module, name, meanings[name, id(value)])
        self._instead.clear()

    def _set(self, owner: types.ModuleType | type, name: str, new: object) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT), new))
        setattr(owner, name, new)


def _modules() -> Iterator[types.ModuleType]:
    """All modules but gradwire's."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _OWN and isinstance(module, types.ModuleType):
            yield module


def _is_torch(module: types.ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "torch"
