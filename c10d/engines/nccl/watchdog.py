"""The thread that sees what nobody waits for."""

import threading
import weakref
from collections.abc import Callable
from typing import final

__all__ = ["Watchdog"]


@final
class Watchdog:
    """Looks after an engine at intervals, as long as there is something to look at.

    Args:
        name: of the thread.
        look: does so, and says whether to look again; a method, whose object is not kept alive.
        interval: seconds.
    """

    def __init__(self, name: str, look: Callable[[], bool], interval: float) -> None:
        self._name = name
        self._find_look = weakref.WeakMethod(look)
        self._interval = interval
        self._changed = threading.Condition()
        self._awake = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is something to look at."""
        with self._changed:
            if self._awake or self._closed:
                return
            self._awake = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._awake or self._closed)
                if self._changed.wait_for(lambda: self._closed, self._interval):
                    return
                self._awake = False  # who wakes it from here on is seen the next time
            look = self._find_look()
            if look is not None and look():
                with self._changed:
                    self._awake = True
            del look  # not to be kept while this thread sleeps
