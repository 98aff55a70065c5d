"""What is installed, and which engines of process groups run here."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten

from .. import __version__
from .findings import Finding, ok, problem, warning

__all__ = ["ROOT", "check_engines", "check_versions"]

ROOT = Path(__file__).parent.parent
"""The folder of the package, which is also that of a checkout."""

REQUIRED_PACKAGES = ("torch", "grpcio", "protobuf", "numpy", "cryptography", "click", "psutil")
OPTIONAL_PACKAGES = ("mpi4py", "cupy", "cloudpickle")
"""Import names; on PyPI, cupy is published under one name per CUDA version."""

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The releases on which gradwire is tested."""

ALWAYS_THERE = ("gloo", "shm")
"""The engines that need no other package."""


def _version_of(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    if package == "torch":
        import torch

        return torch.__version__  # includes the CUDA version of the build
    for name in (package, "cupy-cuda13x", "cupy-cuda12x") if package == "cupy" else (package,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_versions() -> Iterator[Finding]:
    """Yields what is installed."""
    yield ok("gradwire", f"{__version__} in {ROOT}, on Python {platform.python_version()}")
    for package in REQUIRED_PACKAGES:
        try:
            found = _version_of(package)
        except (ImportError, OSError) as error:  # torch, or a library that it needs, is missing
            yield problem(package, f"cannot be imported: {error}", f"install {package} anew")
            continue
        if found is None:
            yield problem(package, "not installed", f"pip install {package}")
        elif package == "torch" and not OLDEST_TORCH <= _release(found) <= NEWEST_TORCH:
            tested = " to ".join(".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
            yield warning(package, f"{found}, which is not tested", f"install one of {tested}")
        else:
            yield ok(package, found)
    for package in OPTIONAL_PACKAGES:
        yield ok(package, _version_of(package) or "not installed (optional)")


def check_engines() -> Iterator[Finding]:
    """Yields which engines run here. mpi and nccl need packages that are optional."""
    from ..c10d.groups.backends import BUILTIN_ENGINES, why_unavailable

    for engine in sorted(BUILTIN_ENGINES):
        reason = why_unavailable(engine)
        text = "available" if reason is None else f"not available: {shorten(reason, 200, placeholder=' …')}"
        if reason is not None and engine in ALWAYS_THERE:
            yield warning(engine, text, "use another engine for process groups")
        else:
            yield ok(engine, text)


def _release(text: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version such as 2.13.0+cpu."""
    return tuple(int(number) for number in text.split(".")[:2])
