"""A thread for receives that nobody waits for.

Most are waited for soon, by a thread that then takes in the message itself. Waking another for them would cost
more than they do, so this one comes by itself every now and then, while receives are posted, for what has been
left alone since it came last. It comes at once if somebody wants to be called back.
"""

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from .receive import PendingReceive

__all__ = ["ProgressThread"]

LOOK_SECONDS = 0.005

LOOKS = 20
"""So often it comes for nothing before it has to be woken."""

IDLE_SECONDS = 10.0
"""It ends when nobody has woken it for so long; the next receive starts another."""


@final
class ProgressThread:
    """Owned by a mailbox, of which `left_alone` is a method: it gives the receives that nobody waits for."""

    def __init__(self, left_alone: "Callable[[], list[PendingReceive]]") -> None:
        self._find_left_alone = weakref.WeakMethod(left_alone)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._looking = False
        self._closed = False

    def attend(self) -> None:
        """A receive has been posted."""
        if not self._looking:
            self.hurry()

    def hurry(self) -> None:
        """There is one that nobody will wait for."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="gradwire-receives", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, and waits for it."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _left_alone(self) -> "list[PendingReceive]":
        find = self._find_left_alone()
        return [] if find is None else find()  # the mailbox may be gone

    def _run(self) -> None:
        while not self._closed:
            if self._wake.wait(IDLE_SECONDS):
                self._look()
            elif self._may_end():
                return

    def _look(self) -> None:
        """Waits for what has been left alone; returns when there has been nothing for a while."""
        before: list[PendingReceive] = []
        looks = 0
        self._looking = True
        while looks < LOOKS and not self._closed:
            self._wake.clear()
            now = self._left_alone()
            alone = [receive for receive in now if receive in before or receive.callbacks]
            if alone:
                self._wait_for(alone[0])
            before = now
            looks = 0 if now else looks + 1
            if not alone:
                self._wake.wait(LOOK_SECONDS)
        self._looking = False
        if self._left_alone():  # posted while it went
            self._wake.set()

    def _wait_for(self, receive: "PendingReceive") -> None:
        try:
            receive.wait(None)
        except Exception:  # whoever asks for its result learns of it
            return

    def _may_end(self) -> bool:
        with self._lock:
            if self._wake.is_set():
                return False
            self._thread = None
            return True
