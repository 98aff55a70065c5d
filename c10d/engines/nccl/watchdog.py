"""A thread that polls for the completion and the failure of operations that nobody waits for."""

import threading
import weakref
from collections.abc import Callable
from typing import final

__all__ = ["Watchdog"]


@final
class Watchdog:
    """Calls a function at intervals as long as there is something to poll. Owned by a Runner.

    Args:
        name: of the thread.
        poll: a method that returns whether to call it again; its object is not kept alive.
        interval: seconds between calls.
    """

    def __init__(self, name: str, poll: Callable[[], bool], interval: float) -> None:
        self._name = name
        self._poll_method = weakref.WeakMethod(poll)
        self._interval = interval
        self._changed = threading.Condition()
        self._is_awake = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Starts polling, if the watchdog is not polling already."""
        with self._changed:
            if self._is_awake or self._is_closed:
                return
            self._is_awake = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, and waits for it unless called on it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_awake or self._is_closed)
                if self._changed.wait_for(lambda: self._is_closed, self._interval):
                    return
                self._is_awake = False  # before polling: an operation that is added meanwhile wakes it again
            poll = self._poll_method()
            if poll is not None and poll():
                with self._changed:
                    self._is_awake = True
            del poll  # must not keep its object alive while this thread sleeps
