"""Waits for a socket on the thread that needs what the socket brings.

The thread first busy-polls the socket for a moment: it looks again and again before it sleeps, since to be woken
takes longer.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol, final

from .ctrl_c import ctrl_c, interruptible
from .latch import MAX_SLICE_S

__all__ = ["Events", "SocketWaiter", "Spinner", "Wakeable"]

_SLICE_MS = round(1000 * MAX_SLICE_S)
"""Milliseconds after which a wait begins again: see `acquire` of latch.py."""

MAX_LOOK_S = 3e-4
"""Seconds that one look may take. If it takes longer, others need the interpreter or the processor."""

MAX_SKIPPED = 64
"""Waits in a row, at most, in which the thread does not look again and again."""

Events = list[tuple[int, int]]
"""Descriptors that are ready, with the events of each."""


@final
class Spinner:
    """Busy-polls descriptors, or looks once if more has been in vain lately. Used by one thread.

    Between two looks it yields the processor, perhaps to the worker that is to answer: the kernel often has both
    run on the same one, although another is idle.
    """

    def __init__(self, seconds: float) -> None:
        """Args: seconds: how long it looks at most; 0 for once."""
        self._seconds = seconds
        self._to_skip = 0
        """Waits from now on in which it looks once."""
        self._skips = 0
        """How many such waits followed the last one that was in vain."""

    def spin(self, poll: Callable[[int], Events], stop: Callable[[], object] = bool) -> Events:
        """Looks at the descriptors.

        Args:
            poll: returns what is ready; its argument is 0.
            stop: returns whether to look no longer.

        Returns what is ready: nothing if nothing became ready in time, or if something else has to run.
        """
        if self._to_skip or not self._seconds:
            if self._to_skip:
                self._to_skip -= 1
            return poll(0)  # one look costs less than to go to sleep, and what follows a message may be there
        before = time.monotonic()
        end = before + self._seconds
        while not (events := poll(0)):
            now = time.monotonic()
            if now > end:
                self._skips = self._to_skip = min(2 * self._skips + 1, MAX_SKIPPED)
                return events
            if now > before + MAX_LOOK_S or stop():
                return events
            before = now
            os.sched_yield()
        self._skips = 0
        return events


class Wakeable(Protocol):
    """What a thread waits by: a held lock, or a SocketWaiter."""

    def release(self) -> None:
        """Ends the wait."""


@final
class SocketWaiter:
    """Waits for a socket to be readable, or for another thread to call `release`. Used by one thread."""

    def __init__(self, busy_poll: float) -> None:
        """Args: busy_poll: see RpcBackendOptions. Raises OSError if no descriptor is left."""
        self._wake = -1
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread_id = threading.get_ident()
        self._idle: tuple[int, select.poll] | None = None
        """The descriptor of the last wait and what polls it; None during a wait."""
        self._spinner = Spinner(busy_poll)

    def __del__(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)

    def release(self) -> None:
        """Ends the wait of the thread, unless it is the calling one."""
        if threading.get_ident() != self._thread_id:
            os.eventfd_write(self._wake, 1)

    @interruptible  # at any step: the next wait finds it as it was, or as it is to be
    def wait(self, descriptor: int) -> bool:
        """Waits for a descriptor; returns whether it is readable, or closed by the peer."""
        if ctrl_c.noted_at is not None:
            ctrl_c.check()
        # Taken, since the handler of a signal that comes during `poll` may wait too.
        idle, self._idle = self._idle, None
        if idle is None or idle[0] != descriptor:
            idle = descriptor, select.poll()
            idle[1].register(self._wake, select.POLLIN)
            idle[1].register(descriptor, select.POLLIN)
        poll = idle[1].poll
        events = self._spinner.spin(poll) or poll(_SLICE_MS)
        while not events:
            events = poll(_SLICE_MS)
        self._idle = idle
        is_readable = False
        for ready, _ in events:
            if ready == self._wake:
                os.eventfd_read(self._wake)
            else:
                is_readable = True
        return is_readable
