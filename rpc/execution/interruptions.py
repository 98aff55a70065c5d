"""What signals and finalizers interrupt: waits of gradwire that notice signals, and code that may hold a lock.

The handler of a signal, or a finalizer, runs at any line of the code of its thread, which goes on when it returns.
If that code holds a lock, a handler that waits for another thread which needs the lock waits for ever. gradwire
calls no code of the program while it holds one. So it is enough to look at the innermost frame that was
interrupted: if that is one of the program's, whatever has called it holds none.
"""

import sys
import threading
import time
from contextlib import suppress
from inspect import CO_VARARGS
from types import FrameType
from typing import final

from .ctrl_c import ctrl_c, interruptible

__all__ = [
    "MAX_SLICE_S",
    "Latch",
    "acquire",
    "handler_must_not_wait",
    "may_have_lock",
    "start_thread",
    "under_finalizer",
]

FIRST_SLICE_S = 0.02
MAX_SLICE_S = 1.0
"""Seconds of the first slice of a wait, and of the longest; each is twice as long as that before."""

_PACKAGE = __name__.partition(".")[0]

_LOCKING = frozenset({"_frozen_importlib", "_frozen_importlib_external", "importlib", "logging", "threading"})
"""Modules of the standard library with locks that a thread of gradwire may need as well."""

_WAITS = frozenset({"_wait_for_tstate_lock", "acquire", "join", "wait", "wait_for"})
"""Functions of these modules that hold none while they wait."""


@interruptible
def acquire(lock: threading.Lock, seconds: float | None = None) -> bool:
    """Acquires a lock as `lock.acquire` does, but runs the handlers of all signals; returns whether it has.

    A signal that arrives while the main thread is about to block, and hands over the interpreter, does not wake
    it: Python would run its handler when the wait is over. So the wait is cut into slices.
    """
    ctrl_c.check()
    if seconds is None and lock.acquire(timeout=FIRST_SLICE_S):
        return True
    deadline = None if seconds is None else time.monotonic() + seconds
    length = FIRST_SLICE_S
    while True:
        left = length if deadline is None else min(length, deadline - time.monotonic())
        if lock.acquire(timeout=max(0.0, left)):
            return True
        if left < length:
            return False
        length = min(2 * length, MAX_SLICE_S)


@final
class Latch:
    """An event that is set once and stays set.

    Unlike `threading.Event` it has no lock that is held for longer than one step. So a handler of a signal may set
    it, and wait for it, whatever it has interrupted on its thread: another wait, for instance.
    """

    def __init__(self) -> None:
        self.is_set = False
        """Whether it has been set."""
        self._waiters: list[threading.Lock] = []
        """The held lock of each thread that waits, which is released when the latch is set."""

    def set(self) -> None:
        """Sets it, and wakes the threads that wait."""
        self.is_set = True
        with suppress(IndexError):
            while True:
                self._waiters.pop().release()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is set, for so many seconds at most; returns whether it is set."""
        woken = threading.Lock()
        woken.acquire()
        self._waiters.append(woken)
        if not self.is_set:  # else whoever has set it may have looked at the waiters before
            acquire(woken, seconds)
        with suppress(ValueError):  # `set` has taken it
            self._waiters.remove(woken)
        return self.is_set


def handler_must_not_wait() -> bool:
    """Returns whether the main thread runs a handler of a signal that has interrupted code which may hold a lock.

    A handler is known by its argument, which is the frame that it has interrupted.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and (below := frame.f_back) is not None:
        # In this order: a look at the locals of a frame may keep them alive until its function returns.
        if not _is_ours(frame) and may_have_lock(below) and _has_argument(frame, below):
            return True
        frame = below
    return False


def under_finalizer() -> FrameType | None:
    """Returns the frame that a method `__del__` has interrupted, or was called by; None if none runs here."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame.f_back if frame is not None else None


def start_thread(thread: threading.Thread) -> bool:
    """Starts a thread. Returns False if there can be no more: the system has a limit, or the interpreter ends."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def may_have_lock(frame: FrameType | None) -> bool:
    """Returns whether code that was interrupted in a frame may hold a lock that threads of gradwire need."""
    innermost = frame
    while frame is not None:
        if _is_ours(frame):
            return not _is_in_latch(frame, innermost)
        package = _package_of(frame)
        if package in _LOCKING and frame.f_code.co_name not in _WAITS:
            return True
        if package not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return False


def _is_in_latch(frame: FrameType, innermost: FrameType | None) -> bool:
    """Returns whether a frame, the first one of gradwire, waits for a latch, for which nothing is held."""
    if frame is innermost and frame.f_code is acquire.__code__ and frame.f_back is not None:
        frame = innermost = frame.f_back
    return frame is innermost and frame.f_code is Latch.wait.__code__


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_ours(frame: FrameType) -> bool:
    return _package_of(frame) == _PACKAGE


def _has_argument(frame: FrameType, value: object) -> bool:
    """Returns whether the function of a frame was called with an object as an argument."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    if not count:
        return False
    values = frame.f_locals
    for name in code.co_varnames[:count]:
        found = values.get(name)
        if found is value or (type(found) is tuple and any(each is value for each in found)):
            return True
    return False
