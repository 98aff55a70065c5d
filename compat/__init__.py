"""Runs programs written for torch.distributed.rpc on gradwire, by monkey patching torch's names.

    gradwire run script.py arguments...

runs an unmodified program, with all processes that it starts. A program that can be edited calls, in each process,

    from gradwire import compat
    compat.install()

docs/migrating.md lists the names. Importing this package patches nothing.
"""

from .install import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
