"""The progress thread of the shared-memory engine, which advances receives that no other thread waits for.

Usually a thread of the program soon waits for a receive that it has posted, and reads the message itself. Waking
the progress thread for each such receive would cost more than the receive. So while receives are posted, the
progress thread polls at intervals, and waits for a receive itself once two polls in a row have found it without a
waiting thread. For a receive with a callback one poll is enough, and adding a callback makes the thread poll at
once.
"""

import threading
import weakref
from collections.abc import Callable
from typing import final

from .receive import PendingReceive

__all__ = ["ProgressThread"]

POLL_INTERVAL_S = 0.005
"""Seconds between two polls."""

MAX_IDLE_POLLS = 20
"""Consecutive polls without a receive to advance, after which the thread stops polling until it is woken."""

IDLE_TIMEOUT_S = 10.0
"""Seconds without being woken after which the thread ends; the next posted receive starts another one."""


@final
class ProgressThread:
    """Advances the posted receives of a P2PChannels object (p2p_channel.py), which owns the progress thread.

    Args:
        find_without_waiter: a bound method that returns the posted receives that no thread waits for. Its object
            is referenced weakly.
    """

    def __init__(self, find_without_waiter: Callable[[], list[PendingReceive]]) -> None:
        self._find_without_waiter_method = weakref.WeakMethod(find_without_waiter)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_polling = False
        """Whether `_poll` runs, so that a new receive need not wake the thread."""
        self._is_closed = False

    def on_posted(self) -> None:
        """Wakes the thread unless it is polling already. Called after a receive has been posted."""
        if not self._is_polling:
            self.wake()

    def wake(self) -> None:
        """Makes the thread poll at once, and starts it if it is not running."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="gradwire-receives", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, and waits until it has ended unless called on the thread itself."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _find_without_waiter(self) -> list[PendingReceive]:
        """Returns the receives that no thread waits for; none if the owner has been garbage-collected."""
        find = self._find_without_waiter_method()
        return [] if find is None else find()

    def _run(self) -> None:
        """Runs the thread: polls whenever it is woken, and ends when closed or idle for `IDLE_TIMEOUT_S`."""
        while not self._is_closed:
            if self._wake.wait(IDLE_TIMEOUT_S):
                self._poll()
            elif self._stop_if_idle():
                return

    def _poll(self) -> None:
        """Polls, and waits for receives without a waiting thread, until `MAX_IDLE_POLLS` polls found none."""
        previous: list[PendingReceive] = []
        idle_polls = 0
        self._is_polling = True
        while idle_polls < MAX_IDLE_POLLS and not self._is_closed:
            self._wake.clear()
            without_waiter = self._find_without_waiter()
            due = [receive for receive in without_waiter if receive in previous or receive.callbacks]
            if due:
                self._wait_for(due[0])  # which advances all other posted receives too
            previous = without_waiter
            idle_polls = 0 if without_waiter else idle_polls + 1
            if not due:
                self._wake.wait(POLL_INTERVAL_S)
        self._is_polling = False
        # Receives that were posted before _is_polling was cleared did not wake this thread.
        if self._find_without_waiter():
            self._wake.set()

    def _wait_for(self, receive: PendingReceive) -> None:
        """Blocks until a receive is done or has failed."""
        try:
            receive.wait(None)
        except Exception:  # the receive stores it, and raises it when its user waits
            return

    def _stop_if_idle(self) -> bool:
        """Unregisters the thread, which is about to end; returns False if it has been woken meanwhile."""
        with self._lock:
            if self._wake.is_set():
                return False
            self._thread = None
            return True
