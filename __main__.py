"""Prints installed versions, the engines available on this machine, and further commands.

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
from .c10d.backends import BUILTIN_ENGINES

__all__ = ["describe", "main"]

ROOT = Path(__file__).parent
REQUIRED_PACKAGES = ("torch", "grpcio", "protobuf", "numpy")
OPTIONAL_PACKAGES = ("mpi4py", "cupy")
"""Import names; on PyPI, cupy is published under one name per CUDA version."""
COMMANDS = {
    "python -m gradwire.compat script.py": "runs an unmodified torch.distributed.rpc program on gradwire",
    "python -m gradwire.store --log FILE": "runs a store that outlives the workers, and can be started again",
    "python -m gradwire.certs": "makes a token, or a CA and certificates, for connections between hosts",
    "python -m gradwire.c10d.debug.report FOLDER": "shows from flight recorder files where each rank is stuck",
}


def main(arguments: list[str]) -> None:
    """Runs the command line."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
    elif arguments:
        sys.exit(f"python -m gradwire takes no arguments, but was given {' '.join(arguments)}")
    else:
        print(describe())


def describe() -> str:
    """Returns the report, as lines of text."""
    lines = [
        f"gradwire {__version__} in {ROOT}",
        f"on Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "",
        "Packages",
        *(f"  {name:<9} {_version_of(name)}" for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)),
        "",
        "Engines of process groups",
        *(f"  {name:<9} {_availability_of(name)}" for name in sorted(BUILTIN_ENGINES)),
        "",
        "Commands",
        *(f"  {command}\n      {purpose}" for command, purpose in COMMANDS.items()),
    ]
    if (ROOT / "examples").is_dir():  # in a checkout; a wheel has no examples and docs
        lines += ["", f"Examples  {ROOT / 'examples'}", f"Docs      {ROOT / 'docs'}; first {ROOT / 'README.md'}"]
    return "\n".join(lines)


def _availability_of(engine: str) -> str:
    reason = why_unavailable(engine)
    return "available" if reason is None else "not available: " + shorten(reason, 200, placeholder=" …")


def _version_of(package: str) -> str:
    if package == "torch":
        return torch.__version__  # includes the CUDA version of the build
    for name in (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
