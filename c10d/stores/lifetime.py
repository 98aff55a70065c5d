"""Keeps the open stores of this process alive, and closes them when it ends.

C++ code that was given a Python store (a torch.distributed.PrefixStore, a process group) does not keep the Python
object alive, and its calls fail once that object is gone.
"""

import contextlib
import os
import threading
from multiprocessing.util import Finalize
from typing import Protocol

__all__ = ["Closable", "keep_alive", "release"]


class Closable(Protocol):
    """An object that can be kept alive, such as a store."""

    def close(self) -> None:
        """Releases its resources."""


_lock = threading.Lock()
_open: dict[Closable, None] = {}
_process = 0


def keep_alive(store: Closable) -> None:
    """Holds a reference to a store until `release`; closes the store if the process ends before that."""
    global _process, _lock  # noqa: PLW0603 - a forked process starts over
    if _process != os.getpid():
        _process = os.getpid()
        _lock = threading.Lock()
        # The parent's stores stay in `_open`. They cannot be used in this process, but freeing them would close
        # connections that the parent still uses.
        # Finalize, unlike atexit, also runs in the children of multiprocessing.
        Finalize(None, _close_all, exitpriority=10)
    with _lock:
        _open[store] = None


def release(store: Closable) -> None:
    """Drops the reference to a store. Further calls do nothing."""
    with _lock:
        _open.pop(store, None)


def _close_all() -> None:
    for store in reversed(list(_open)):
        with contextlib.suppress(Exception):  # the process is ending, so nobody could handle the error
            store.close()
