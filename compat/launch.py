"""Runs a program written for torch.distributed.rpc, and the Python processes it starts, on gradwire."""

import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from .defaults import Defaults, export_defaults
from .install import install

__all__ = ["install_in_children", "run_module", "run_script"]

SITE_DIRECTORY = Path(__file__).with_name("site")
"""Has a sitecustomize.py, which Python runs at startup."""


def install_in_children(
    environment: MutableMapping[str, str] = os.environ,
    values: Defaults = Defaults(),  # noqa: B008 - only read
) -> None:
    """Makes the Python processes that are started with an environment install the compatibility layer.

    It sets PYTHONPATH, so processes that ignore that variable (`python -E`, `python -I`) run on torch's own agent.

    Args:
        environment: the environment to change.
        values: the arguments with which the processes call `install`.
    """
    export_defaults(environment, values)
    own = str(SITE_DIRECTORY)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != own]
    environment["PYTHONPATH"] = os.pathsep.join([own, *paths])


def run_script(path: str, arguments: Sequence[str], values: Defaults) -> None:
    """Runs a file as `python path arguments...` does, on gradwire."""
    _install_everywhere(values)
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str], values: Defaults) -> None:
    """Runs a module as `python -m name arguments...` does, on gradwire."""
    _install_everywhere(values)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _install_everywhere(values: Defaults) -> None:
    install_in_children(values=values)
    install(insecure=values.insecure, host=values.host, transports=values.transports)
