"""Where in the user's program a collective was called."""

import sys
from functools import cache
from pathlib import Path
from types import FrameType

import torch

__all__ = ["CallSite", "caller"]

CallSite = tuple[str, int]
"""File and line."""

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


def caller(skip: int = 0) -> CallSite:
    """The innermost line that is neither gradwire's nor torch's, or the outermost if all are.

    skip: so many of the innermost are known to be gradwire's. Looking at each takes time.
    """
    frame: FrameType | None = sys._getframe(1 + skip)
    file, line = "", 0
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not _is_of_a_library(file):
            break
        frame = frame.f_back
    return file, line


@cache  # this is asked several times for each call of a collective
def _is_of_a_library(file: str) -> bool:
    return file.startswith((_OURS, _TORCH))
