"""Programs written for torch.distributed.rpc run on gradwire, unchanged.

    python -m gradwire.compat script.py arguments...

runs one, with all processes that it starts. A program that can have two lines more calls

    from gradwire import compat
    compat.install()

in each of its processes. docs/migrating.md has the table of names.
"""

from .install import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
