"""Says what is installed, which engines run here, and what else can be run.

python -m gradwire
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten

import torch

from . import __version__
from .c10d.availability import why_unavailable
from .c10d.backends import OWN

__all__ = ["describe", "main"]

ROOT = Path(__file__).parent
NEEDED = ("torch", "grpcio", "protobuf", "numpy")
OPTIONAL = ("mpi4py", "cupy")
"""Imported by their names; the packages of cupy are called after versions of CUDA."""
COMMANDS = {
    "python -m gradwire.compat script.py": "runs a program written for torch.distributed.rpc, unedited",
    "python -m gradwire.c10d.debug.report FOLDER": "says which rank is stuck where, from flight recorder files",
}


def main(arguments: list[str]) -> None:
    """The command line."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
    elif arguments:
        sys.exit(f"python -m gradwire takes no arguments, but was given {' '.join(arguments)}")
    else:
        print(describe())


def describe() -> str:
    """Returns what there is, as text of several lines."""
    lines = [
        f"gradwire {__version__} in {ROOT}",
        f"on Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "",
        "Packages",
        *(f"  {name:<9} {_version_of(name)}" for name in (*NEEDED, *OPTIONAL)),
        "",
        "Engines of process groups",
        *(f"  {name:<9} {_state_of(name)}" for name in sorted(OWN)),
        "",
        "Commands",
        *(f"  {command}\n      {what}" for command, what in COMMANDS.items()),
    ]
    if (ROOT / "examples").is_dir():  # a checkout; an installed wheel has neither
        lines += ["", f"Examples  {ROOT / 'examples'}", f"Docs      {ROOT / 'docs'}; first {ROOT / 'README.md'}"]
    return "\n".join(lines)


def _state_of(engine: str) -> str:
    reason = why_unavailable(engine)
    return "available" if reason is None else "not available: " + shorten(reason, 200, placeholder=" …")


def _version_of(package: str) -> str:
    if package == "torch":
        return torch.__version__  # says also for which CUDA it was built
    for name in (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
