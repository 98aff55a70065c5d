"""Which stores are open in this process.

C++ code that was given a Python store (a torch.distributed.PrefixStore, a process group) does not keep the
Python object alive, and aborts the call when it is gone. So an open store is held here until it is closed,
or until the process ends, when those still open are closed.
"""

import contextlib
import os
import threading
from multiprocessing.util import Finalize
from typing import Protocol

__all__ = ["Closable", "hold", "release"]


class Closable(Protocol):
    """What is held."""

    def close(self) -> None:
        """Releases it."""


_guard = threading.Lock()
_held: dict[Closable, None] = {}
_process = 0


def hold(store: Closable) -> None:
    """Keeps a store alive until `release`, and closes it when the process ends before that."""
    global _process, _guard  # noqa: PLW0603 - a forked process starts over
    if _process != os.getpid():
        _process = os.getpid()
        _guard = threading.Lock()
        # The parent's stores stay in `_held`: here they are of no use, but freeing them would close
        # connections that the parent still uses. They refuse to work and to be closed in this process.
        # Finalize, unlike atexit, also runs in the children of multiprocessing.
        Finalize(None, _close_all, exitpriority=10)
    with _guard:
        _held[store] = None


def release(store: Closable) -> None:
    """Forgets a store. Doing it again does nothing."""
    with _guard:
        _held.pop(store, None)


def _close_all() -> None:
    for store in reversed(list(_held)):
        with contextlib.suppress(Exception):  # the process is ending; there is nobody to tell
            store.close()
