"""Finds the line of the user's program that called a collective."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["CallSite", "called_at", "find_call_site", "find_call_site_of_thread", "is_in_library"]

CallSite = tuple[str, int]
"""File and line."""

_GRADWIRE = Path(__file__).parents[2]
_PACKAGES = ("autograd", "c10d", "compat", "nn", "optim", "rpc", "rref")
_LIBRARIES = (*(f"{_GRADWIRE / name}{os.sep}" for name in _PACKAGES), f"{Path(torch.__file__).parent}{os.sep}")


def find_call_site(skip: int = 0) -> CallSite:
    """Returns the innermost line on the stack that is neither in gradwire nor in torch; else the outermost.

    `skip` innermost frames are known to be gradwire's, beside this function's. Looking at a frame costs time.
    """
    frame: FrameType | None
    try:
        frame = sys._getframe(1 + skip)
    except ValueError:  # C++ has called gradwire on a thread that runs no Python, so no frame is the caller's
        frame = sys._getframe(1)
    file, line = "", 0
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_in_library(file):
            break
        frame = frame.f_back
    return file, line


_call_site: ContextVar[CallSite | None] = ContextVar("call_site", default=None)


@contextmanager
def called_at(call_site: CallSite) -> Iterator[None]:
    """Context manager in which the calling thread does what another thread was called for in some line."""
    token = _call_site.set(call_site)
    try:
        yield
    finally:
        _call_site.reset(token)


def find_call_site_of_thread() -> CallSite:
    """Returns the line that `called_at` names, else what `find_call_site` returns."""
    return _call_site.get() or find_call_site(1)


@cache  # asked several times for each operation
def is_in_library(file: str) -> bool:
    """Returns whether a source file is gradwire's or torch's."""
    return file.startswith(_LIBRARIES)
