"""Replaces the names of torch.distributed.rpc and related modules by gradwire's, and restores them."""

import importlib
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import final

from ..rpc.backend_registry import backend_registered, register_backend
from ..rpc.contracts.options import TRANSPORTS
from . import faulty, tensorpipe
from .import_hooks import call_on_import
from .methods import METHODS
from .names import REPLACEMENTS
from .patches import Patches
from .provided import provide
from .tensorpipe import defaults

__all__ = ["install", "is_installed", "uninstall"]

BACKENDS = {
    "FAULTY_TENSORPIPE": (faulty.construct_options, faulty.start),
    "TENSORPIPE": (tensorpipe.construct_options, tensorpipe.start),
}
"""What makes the options of a backend and starts its agent, by the name that it is registered with."""

IMPORTED_FIRST = ("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.rpc._testing")
"""Modules to import before patching.

`import torch` imports the first two. The third makes C++ classes that inherit from classes which are patched. All
other modules are patched when the program imports them.
"""


def install(*, insecure: bool = False, host: str | None = None, transports: Sequence[str] | None = None) -> None:
    """Replaces the public and private names of torch.distributed.rpc and of the modules built on it by gradwire's.

    Globals of modules that have imported such names already are replaced as well. Calling `install` again only
    sets those defaults that are given.

    Args:
        insecure: the default of an option that torch does not have, for workers on several hosts: see
            `gradwire.rpc.RpcBackendOptions` and docs/hosts.md.
        host: likewise.
        transports: the default of what may carry messages: see `gradwire.rpc.RpcBackendOptions`.
    """
    defaults.insecure = insecure or defaults.insecure
    defaults.host = host or defaults.host
    defaults.transports = transports or defaults.transports
    _installation.install()


def uninstall() -> None:
    """Restores torch's names, and the defaults of the options."""
    defaults.insecure, defaults.host, defaults.transports = False, None, TRANSPORTS
    _installation.uninstall()


def is_installed() -> bool:
    """Returns whether torch's names are replaced by gradwire's in this process."""
    return _installation.is_installed


@final
class _Installation:
    """The patches of this process, and the import hooks of modules that will be patched when they are imported."""

    def __init__(self) -> None:
        self.is_installed = False
        self._is_complete = False  # whether `install` has patched all modules that were imported before it
        self._lock = threading.Lock()
        self._patches = Patches()
        self._provided: Sequence[str] = ()  # modules that this torch does not have
        self._remove_hooks: list[Callable[[], None]] = []

    def install(self) -> None:
        with self._lock:
            if self.is_installed:
                return
            self.is_installed = True
            for name, handlers in BACKENDS.items():
                if not backend_registered(name):
                    register_backend(name, *handlers)
            self._provided = provide(self._patches)
            for name in IMPORTED_FIRST:
                importlib.import_module(name)
            for owner, methods in METHODS.items():
                self._patches.patch(owner, methods)
            self._remove_hooks = [call_on_import(name, self._patch_module) for name in REPLACEMENTS]
            self._is_complete = True
            self._patches.patch_importers()

    def uninstall(self) -> None:
        with self._lock:
            for remove in self._remove_hooks:
                remove()
            self._patches.undo()
            for name in self._provided:
                sys.modules.pop(name, None)
            self._provided = ()
            self.is_installed = self._is_complete = False

    def _patch_module(self, module: types.ModuleType) -> None:
        self._patches.patch(module, REPLACEMENTS[module.__name__])
        if self._is_complete:  # else `install` looks through all modules, once for all tables
            self._patches.patch_importers()


_installation = _Installation()
