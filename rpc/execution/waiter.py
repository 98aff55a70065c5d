"""Waits for a socket on the thread that needs what the socket brings.

The thread looks at the socket without blocking for a moment before it blocks: to be woken takes longer than many
calls do. It stops doing so while that is in vain, and while threads have to wait for a processor.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol, final

__all__ = ["SocketWaiter", "Spinner", "Wakeable", "processor_delay_ns"]

MAX_LOOK_S = 3e-4
"""Seconds that one look may take. If it takes longer, another thread needs the interpreter or the processor."""

MAX_SKIPPED = 64
"""Waits in a row, at most, in which the thread does not look again and again."""

DELAY_SKIPPED = 16
"""Those after the first delay; twice as many after each further one."""

CHECK_INTERVAL_S = 0.005
"""Seconds after which a thread looks whether it has had to wait for a processor, at the earliest."""

MAX_DELAY = 0.2
"""Share of the time in which a thread may have been ready to run and had no processor. On two processors, threads
that look at sockets are delayed by all others of their processes, for some per cent of the time."""

Events = list[tuple[int, int]]
"""Descriptors that are ready, with the events of each."""


def processor_delay_ns() -> int | None:
    """Returns for how many nanoseconds this thread was ready to run and had no processor; None if nobody knows."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            _, delay, _ = file.read(128).split()
        return int(delay)
    except (OSError, ValueError):
        return None


@final
class Spinner:
    """Looks at descriptors again and again, or once if more has been in vain lately. Used by one thread.

    It looks once, too, while the thread has to wait for a processor now and then: others that can run then have to
    wait as well, perhaps for the thread that looks.
    """

    def __init__(self, seconds: float, delay_ns: Callable[[], int | None] = processor_delay_ns) -> None:
        """Has not looked yet.

        Args:
            seconds: how long it looks at most; 0 for once, as it is where there is one processor.
            delay_ns: returns how long the calling thread has had to wait for a processor so far.
        """
        self._seconds = seconds if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._read_delay_ns = delay_ns
        self._to_skip = 0
        """Waits from now on in which it looks once."""
        self._skips = 0
        """How many such waits followed the last one that was in vain."""
        self._delay_skips = 0
        """How many followed the last delay."""
        self._checked = time.monotonic()
        """When it has looked for delays last."""
        self._delay_ns: int | None = None
        """How long the thread had waited for a processor at that time; None if nobody knows, or if it has not
        looked again and again since."""

    def spin(self, poll: Callable[[int], Events], stop: Callable[[], object] = bool) -> Events:
        """Looks at the descriptors.

        Args:
            poll: returns what is ready; its argument is 0.
            stop: returns whether to look no longer.

        Returns:
            What is ready; nothing if nothing became ready in time, or if something else has to run.
        """
        if self._to_skip or not self._seconds:
            self._to_skip = max(0, self._to_skip - 1)
            return poll(0)  # one look costs less than to go to sleep, and what follows a message may be there
        before = time.monotonic()
        if before > self._checked + CHECK_INTERVAL_S and self._was_delayed(before):
            self._to_skip = self._delay_skips = min(2 * self._delay_skips or DELAY_SKIPPED, MAX_SKIPPED)
            self._delay_ns = None
            return poll(0)
        end = before + self._seconds
        while not (events := poll(0)):
            now = time.monotonic()
            if now > end:
                self._skips = self._to_skip = min(2 * self._skips + 1, MAX_SKIPPED)
                return events
            if now > before + MAX_LOOK_S or stop():
                return events
            before = now
        self._skips = 0
        return events

    def discard_delays(self) -> None:
        """Has the delays up to now not count: the thread has slept, and those that ran are busy with something."""
        self._delay_ns = None

    def _was_delayed(self, now: float) -> bool:
        """Returns whether the thread has had to wait for a processor since the last time that this was called."""
        seconds, self._checked = now - self._checked, now
        before, self._delay_ns = self._delay_ns, self._read_delay_ns()
        if before is None or self._delay_ns is None:
            return False
        if (self._delay_ns - before) / 1e9 > MAX_DELAY * seconds:
            return True
        self._delay_skips = 0
        return False


class Wakeable(Protocol):
    """What a thread waits by: a held lock, or a SocketWaiter."""

    def release(self) -> None:
        """Ends the wait."""


@final
class SocketWaiter:
    """Waits for a socket to be readable, or for another thread to call `release`. Used by one thread.

    A signal may interrupt it between any two steps, as long as the next wait finds it as it was or as it is to be.
    """

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

    def wait(self, descriptor: int) -> bool:
        """Waits for a descriptor; returns whether it is readable, or closed by the peer."""
        # Taken, since the handler of a signal that comes during `poll` may wait too.
        idle, self._idle = self._idle, None
        if idle is None or idle[0] != descriptor:
            idle = descriptor, select.poll()
            idle[1].register(self._wake, select.POLLIN)
            idle[1].register(descriptor, select.POLLIN)
        poll = idle[1].poll
        events = self._spinner.spin(poll) or poll()
        self._idle = idle
        is_readable = False
        for ready, _ in events:
            if ready == self._wake:
                os.eventfd_read(self._wake)
            else:
                is_readable = True
        return is_readable
