"""Runs programs written for torch.distributed.rpc on gradwire, by monkey patching torch's names.

    gradwire run script.py arguments...

runs an unmodified program, with all processes that it starts. A program that can be edited calls, in each process,

    from gradwire import compat
    compat.install()

docs/migrating.md lists the names. Importing this package patches nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .installation import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import installation  # imports torch, for which `python -m gradwire.compat` does not wait

    return getattr(installation, name)


def __dir__() -> list[str]:
    return sorted(__all__)
