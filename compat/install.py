"""Moving torch's names to gradwire, and back."""

import importlib
import threading
import types
from collections.abc import Callable
from typing import final

from ..autograd.functions import RecvRpc, SendRpc
from ..nn.remote_module import RemoteModule
from ..rref.rref import RRef
from .contexts import NODE_METHODS
from .defaults import defaults
from .imports import when_imported
from .names import TABLES
from .patches import Patches
from .references import METHODS
from .remote_module import METHODS as MODULE_METHODS

__all__ = ["install", "is_installed", "uninstall"]

FIRST = ("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.rpc._testing")
"""Imported before anything is moved: the first two because they come with torch, the last because it makes classes
in C++ that inherit from some that are moved. Other modules take their turn when the program imports them."""


def install(*, insecure: bool = False, host: str | None = None) -> None:
    """Makes the names of torch.distributed.rpc, of its submodules, and of what is built on it, gradwire's.

    Modules that have imported such names already get gradwire's too. Doing it again only changes the defaults that
    it is given.

    Args:
        insecure: the default of the option that torch does not have, for workers on several hosts. See
            `gradwire.rpc.RpcBackendOptions`, and docs/hosts.md.
        host: likewise.
    """
    defaults.insecure = insecure or defaults.insecure
    defaults.host = host or defaults.host
    _installation.begin()


def uninstall() -> None:
    """Gives torch its names back."""
    defaults.insecure, defaults.host = False, None
    _installation.end()


def is_installed() -> bool:
    """Are torch's names gradwire's?"""
    return _installation.there


@final
class _Installation:
    """What has been done to torch in this process."""

    def __init__(self) -> None:
        self.there = False
        self._lock = threading.Lock()
        self._patches = Patches()
        self._waiting: list[Callable[[], None]] = []

    def begin(self) -> None:
        with self._lock:
            if self.there:
                return
            self.there = True
            for name in FIRST:
                importlib.import_module(name)
            self._patches.replace(RRef, METHODS)
            self._patches.replace(RemoteModule, MODULE_METHODS)
            for function in (SendRpc, RecvRpc):
                self._patches.replace(function._backward_cls, NODE_METHODS)
            self._waiting = [when_imported(name, self._move) for name in TABLES]

    def end(self) -> None:
        with self._lock:
            for stop in self._waiting:
                stop()
            self._patches.undo()
            self.there = False

    def _move(self, module: types.ModuleType) -> None:
        self._patches.replace(module, TABLES[module.__name__]())
        self._patches.spread()


_installation = _Installation()
