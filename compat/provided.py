"""Modules of torch.distributed.rpc for a torch without RPC: a build without it, or a release that has dropped it.

They have the names that programs use, on gradwire. Where torch has RPC, its modules are patched instead.
"""

import importlib
import sys
import types
from datetime import timedelta
from importlib.machinery import ModuleSpec

from .. import autograd, nn, optim, rpc
from ..rpc.contracts.messages import UNSET_RPC_TIMEOUT
from ..rpc.contracts.options import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT
from ..rpc.profiling.extension import RPCExecMode
from . import tensorpipe
from .names import REPLACEMENTS, Names, public_names
from .patches import Patches

__all__ = ["provide"]

_RPC = "torch.distributed.rpc"
_AUTOGRAD = "torch.distributed.autograd"
_NN = "torch.distributed.nn"
_OPTIM = "torch.distributed.optim"


def provide(patches: Patches) -> list[str]:
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
        "TensorPipeRpcBackendOptions": tensorpipe.TensorPipeRpcBackendOptions,
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
