"""Replaces the names of torch.distributed.rpc and related modules by gradwire's, and restores them.

A torch without RPC, be it a build without it or a release that has dropped it, gets modules of those names, which
have what programs use of them, on gradwire.
"""

import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.machinery import ModuleSpec
from typing import final

from .. import autograd, nn, optim, rpc
from ..rpc.backend_registry import backend_registered, register_backend
from ..rpc.contracts.messages import UNSET_RPC_TIMEOUT
from ..rpc.contracts.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT, TRANSPORTS
from ..rpc.profiling.extension import RPCExecMode
from . import backends
from .import_hooks import call_on_import
from .names import METHODS, REPLACEMENTS, Names, public_names

__all__ = ["Patches", "install", "is_installed", "uninstall"]

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


_RPC = "torch.distributed.rpc"
_AUTOGRAD = "torch.distributed.autograd"
_NN = "torch.distributed.nn"
_OPTIM = "torch.distributed.optim"


def _provide(patches: Patches) -> list[str]:
    """Makes those modules that this torch does not have, and gives names to those that it has without any.

    Returns the names of those that have been made, in `sys.modules`; `patches` undoes the rest.
    """
    tables: dict[str, Names] = {}
    if not _is_available(_RPC):
        tables.update(RPC_MODULES)
    if not _is_available(_AUTOGRAD):
        tables.update(AUTOGRAD_MODULES)
    if tables:
        tables.update(MODULES_BUILT_ON_IT)
    made = []
    for name, names in tables.items():
        if not _is_present(name):
            sys.modules[name] = _empty_module(name)
            made.append(name)
        module = sys.modules[name]
        patches.patch(module, names)
        parent, _, child = name.rpartition(".")
        patches.patch(sys.modules[parent], {child: module})
    return made


def _is_available(name: str) -> bool:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return bool(module.is_available())


def _is_present(name: str) -> bool:
    """Returns whether torch has a module. Those of RPC need its C++ part, or end the process without it."""
    if name in sys.modules:
        return True
    if name.startswith((_RPC, _AUTOGRAD, "torch._C.")):
        return False
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError):
        return False
    return True


def _empty_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "Made by gradwire, since this torch has no RPC.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    return module


def _is_available_to_caller() -> bool:
    """Returns True to programs; and False to torch, which asks whether it can use the C++ part of its own."""
    caller: str = sys._getframe(1).f_globals.get("__name__", "")
    return not caller.startswith("torch.")


_RPC_EXTENSION, _API = REPLACEMENTS["torch._C._distributed_rpc"], REPLACEMENTS[f"{_RPC}.api"]

RPC_MODULES: dict[str, Names] = {
    "torch._C._distributed_rpc": _RPC_EXTENSION,
    _RPC: {
        **public_names(rpc),
        **_RPC_EXTENSION,
        **_API,
        **REPLACEMENTS[_RPC],
        "TensorPipeRpcBackendOptions": backends.TensorPipeRpcBackendOptions,
        "is_available": _is_available_to_caller,
    },
    f"{_RPC}.api": {**public_names(rpc), **_RPC_EXTENSION, **_API, "_ignore_rref_leak": True},
    f"{_RPC}.constants": {
        "DEFAULT_INIT_METHOD": DEFAULT_INIT_METHOD,
        "DEFAULT_NUM_WORKER_THREADS": 16,
        "DEFAULT_PROCESS_GROUP_TIMEOUT": timedelta(milliseconds=2**31 - 1),
        "DEFAULT_RPC_TIMEOUT_SEC": DEFAULT_RPC_TIMEOUT,
        "DEFAULT_SHUTDOWN_TIMEOUT": 0.0,
        "UNSET_RPC_TIMEOUT": UNSET_RPC_TIMEOUT,
    },
    f"{_RPC}.internal": {"RPCExecMode": RPCExecMode},
    **{
        name: names
        for name, names in REPLACEMENTS.items()
        if name.startswith(f"{_RPC}.") and name != f"{_RPC}.api"
    },
}
"""The modules of RPC, each after its parent, with their names."""

AUTOGRAD_MODULES: dict[str, Names] = {
    "torch._C._distributed_autograd": REPLACEMENTS["torch._C._distributed_autograd"],
    _AUTOGRAD: {
        **public_names(autograd),
        **REPLACEMENTS["torch._C._distributed_autograd"],
        **REPLACEMENTS[_AUTOGRAD],
        "is_available": _is_available_to_caller,
    },
}

MODULES_BUILT_ON_IT: dict[str, Names] = {
    _OPTIM: {"DistributedOptimizer": optim.DistributedOptimizer},
    f"{_OPTIM}.optimizer": REPLACEMENTS[f"{_OPTIM}.optimizer"],
    _NN: {"RemoteModule": nn.RemoteModule},
    f"{_NN}.api": {},
    f"{_NN}.api.remote_module": REPLACEMENTS[f"{_NN}.api.remote_module"],
}
"""Modules that torch has without the names that need RPC."""


BACKENDS = {
    "FAULTY_TENSORPIPE": (backends.construct_faulty_options, backends.start_faulty),
    "TENSORPIPE": (backends.construct_tensorpipe_options, backends.start_tensorpipe),
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
    defaults = backends.defaults
    defaults.insecure = insecure or defaults.insecure
    defaults.host = host or defaults.host
    defaults.transports = transports or defaults.transports
    _installation.install()


def uninstall() -> None:
    """Restores torch's names, and the defaults of the options."""
    defaults = backends.defaults
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
            self._provided = _provide(self._patches)
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
