"""Where in the user's program a collective was called."""

import sys
from pathlib import Path
from types import FrameType

import torch

__all__ = ["Place", "caller"]

Place = tuple[str, int]
"""File and line."""

_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)


def caller() -> Place:
    """The innermost line that is neither gradwire's nor torch's, or the outermost if all are."""
    frame: FrameType | None = sys._getframe(1)
    place = ("", 0)
    while frame is not None:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if not place[0].startswith((_OURS, _TORCH)):
            break
        frame = frame.f_back
    return place
