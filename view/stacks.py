"""What the threads of this process do."""

import linecache
import os
import sys
import sysconfig
import threading
from types import FrameType
from typing import Any

from ..c10d.debug.call_site import is_in_library
from ..net.peer_text import printable

__all__ = ["MAX_FRAMES", "MAX_THREADS", "current_line", "stacks"]

MAX_THREADS = 256
MAX_FRAMES = 64
"""Of a thread; the innermost ones."""

_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = f"{sysconfig.get_path('purelib')}{os.sep}"


def stacks() -> list[dict[str, Any]]:
    """Returns the stack of each thread that runs Python, as JSON values; the innermost frame is the first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = sys._current_frames()
    found = []
    for identifier, frame in list(frames.items())[:MAX_THREADS]:
        thread = threads.get(identifier)
        name = printable(thread.name) if thread is not None else f"thread {identifier}"
        is_main = thread is threading.main_thread()
        found.append({"thread": name, "is_main": is_main, "frames": _frames(frame)})
    return sorted(found, key=lambda each: (not each["is_main"], each["thread"]))


def current_line() -> str | None:
    """Returns which line of the user's program the main thread is in, and in which function.

    That is the innermost line which is not of gradwire, torch or Python's library; None if there is none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)
        if not (is_standard or file.startswith("<") or is_in_library(file)):
            return printable(f"{file}:{frame.f_lineno} in {frame.f_code.co_qualname}", 500)
        frame = frame.f_back
    return None


def _frames(innermost: FrameType) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        found.append(
            {
                "file": printable(code.co_filename, 500),
                "line": frame.f_lineno,
                "function": printable(code.co_qualname),
                "text": printable(linecache.getline(code.co_filename, frame.f_lineno or 0).strip()),
            }
        )
        frame = frame.f_back
    return found
