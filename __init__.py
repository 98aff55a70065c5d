"""RPC and distributed autograd for PyTorch, by gRPC, sockets and shared memory."""

# Before anything else imports grpc.
from .net import grpc_setup as grpc_setup  # isort: split

from .logs import set_levels_from_environment  # isort: split

import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "GradwireError",
    "Outcome",
    "autograd",
    "c10d",
    "launch",
    "logs",
    "nn",
    "optim",
    "profile",
    "rpc",
    "rref",
]

__version__ = "0.1.0"

_is_command = "".join(sys.argv[:1]).rpartition("/")[2] == "gradwire" or (
    sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("gradwire", "gradwire.compat")
)
"""The command `gradwire` loads what its subcommands use, so that its help needs no torch, which takes seconds."""

if not _is_command:  # which says itself what is wrong with the variable
    set_levels_from_environment()

if TYPE_CHECKING or not _is_command:
    from . import autograd, c10d, launch, logs, nn, optim, rpc, rref
    from .errors import GradwireError, Outcome
    from .tracing import profile
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        if name in {"GradwireError", "Outcome"}:
            return getattr(import_module(".errors", __name__), name)
        if name == "profile":
            return import_module(".tracing", __name__).profile
        return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
