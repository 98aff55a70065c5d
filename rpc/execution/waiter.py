"""Waits for a socket on the thread that needs what the socket brings.

The thread busy-polls the socket for a moment before it blocks (spinner.py).
"""

import os
import select
import threading
from typing import Protocol, final

from .ctrl_c import ctrl_c, interruptible
from .latch import MAX_SLICE_S
from .spinner import Spinner

__all__ = ["SocketWaiter", "Wakeable"]

_SLICE_MS = round(1000 * MAX_SLICE_S)
"""Milliseconds after which a wait begins again: see `acquire` of latch.py."""


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
