"""Finds the line of the user's program that called a collective."""

import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["CallSite", "find_call_site"]

CallSite = tuple[str, int]
"""File and line."""

_GRADWIRE_C10D = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


def find_call_site(skip: int = 0) -> CallSite:
    """Returns the innermost line on the stack that is neither in gradwire.c10d nor in torch; else the outermost.

    Args:
        skip: innermost frames that are known to be gradwire's, beside this function's. Looking at a frame costs
            time.
    """
    frame: FrameType | None = sys._getframe(1 + skip)
    file, line = "", 0
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not _is_in_library(file):
            break
        frame = frame.f_back
    return file, line


@cache  # asked several times for each operation
def _is_in_library(file: str) -> bool:
    return file.startswith((_GRADWIRE_C10D, _TORCH))
