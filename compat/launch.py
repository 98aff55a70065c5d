"""Running a program that was written for torch.distributed.rpc, and the processes it starts, on gradwire."""

import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from .defaults import Defaults, pass_on
from .install import install

__all__ = ["prepare_children", "run_module", "run_script"]

SITE = Path(__file__).with_name("site")


def prepare_children(
    environment: MutableMapping[str, str] = os.environ,
    given: Defaults = Defaults(),  # noqa: B008 - only read
) -> None:
    """Has the Python processes that are started with this environment install the compatibility layer.

    It works through PYTHONPATH, so not for processes that ignore it (`python -E`, `python -I`).

    Args:
        environment: to change.
        given: what they call `install` with.
    """
    pass_on(environment, given)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), *paths])


def run_script(path: str, arguments: Sequence[str], given: Defaults) -> None:
    """Runs a file as `python path arguments...` does."""
    _prepare(given)
    sys.argv = [path, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str], given: Defaults) -> None:
    """Runs a module as `python -m name arguments...` does."""
    _prepare(given)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _prepare(given: Defaults) -> None:
    prepare_children(given=given)
    install(insecure=given.insecure, host=given.host)
