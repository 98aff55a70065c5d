"""A thread that makes progress with receives that no thread waits for.

Most receives are soon waited for by a thread that reads the message itself; waking another thread for them would
cost more than they do. So the progress thread polls at intervals while receives are posted, and waits for those
that no thread has waited for since its last poll. It polls at once when a receive gets a callback.
"""

import threading
import weakref
from collections.abc import Callable
from typing import final

from .receive import PendingReceive

__all__ = ["ProgressThread"]

POLL_INTERVAL_S = 0.005

MAX_IDLE_POLLS = 20
"""How often the thread polls without finding a receive before it sleeps until it is woken."""

IDLE_TIMEOUT_S = 10.0
"""Seconds without being woken after which the thread ends; the next receive starts another one."""


@final
class ProgressThread:
    """Makes progress with receives that no thread waits for. Owned by the P2PChannels.

    Args:
        find_without_waiter: a method that returns the receives that no thread waits for; its object is not kept
            alive.
    """

    def __init__(self, find_without_waiter: Callable[[], list[PendingReceive]]) -> None:
        self._find_without_waiter_method = weakref.WeakMethod(find_without_waiter)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_polling = False
        self._is_closed = False

    def on_posted(self) -> None:
        """Has the thread poll from now on, as a receive has been posted."""
        if not self._is_polling:
            self.wake()

    def wake(self) -> None:
        """Has the thread poll now."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="gradwire-receives", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, and waits for it unless called on it."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _find_without_waiter(self) -> list[PendingReceive]:
        find = self._find_without_waiter_method()
        return [] if find is None else find()

    def _run(self) -> None:
        while not self._is_closed:
            if self._wake.wait(IDLE_TIMEOUT_S):
                self._poll()
            elif self._stop_if_idle():
                return

    def _poll(self) -> None:
        """Waits for receives that no other thread waits for, until there have been none for a while."""
        previous: list[PendingReceive] = []
        idle_polls = 0
        self._is_polling = True
        while idle_polls < MAX_IDLE_POLLS and not self._is_closed:
            self._wake.clear()
            without_waiter = self._find_without_waiter()
            due = [receive for receive in without_waiter if receive in previous or receive.callbacks]
            if due:
                self._wait_for(due[0])
            previous = without_waiter
            idle_polls = 0 if without_waiter else idle_polls + 1
            if not due:
                self._wake.wait(POLL_INTERVAL_S)
        self._is_polling = False
        # Receives that were posted before _is_polling was cleared did not wake this thread.
        if self._find_without_waiter():
            self._wake.set()

    def _wait_for(self, receive: PendingReceive) -> None:
        try:
            receive.wait(None)
        except Exception:  # the receive keeps its error for its user
            return

    def _stop_if_idle(self) -> bool:
        with self._lock:
            if self._wake.is_set():
                return False
            self._thread = None
            return True
