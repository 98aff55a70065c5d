"""Waits in epoll for file descriptors on behalf of the executor's threads.

A descriptor is given to one thread at a time: when it is ready, it is not waited for again until that thread says
so. A thread that runs functions which it has read from a descriptor may keep it meanwhile; other threads take it
over if that lasts too long.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import final

__all__ = ["READABLE", "WRITABLE", "OnReady", "Poller"]

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT

log = logging.getLogger(__name__)

OnReady = Callable[[], bool]
"""Handles a file descriptor that is ready; returns whether to wait for it again. Must not block or raise.

What it submits to the executor runs on the same thread after it, if the thread has nothing else to do."""


class _ThreadState(threading.local):
    """What the poller keeps about the calling thread."""

    is_reading = False
    """Whether it runs an OnReady."""
    descriptor = -1
    """The file descriptor that it keeps; -1 if there is none."""


@final
class Poller:
    """One epoll for many threads. Safe to use from any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_ready: dict[int, tuple[OnReady, int]] = {}
        """By file descriptor: what handles it, and the events that it is watched for."""
        self._thread = _ThreadState()
        self.kept: dict[int, float] = {}
        """The file descriptors that threads keep, and since when, by the monotonic clock."""
        self.last_ready = 0.0
        """When a file descriptor was ready last, by the monotonic clock."""
        self.is_busy = False
        """Whether the last two times that a descriptor was ready were less than a millisecond apart."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered: each write wakes one thread, and nobody has to read.
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLET)

    @property
    def is_reading(self) -> bool:
        """Whether the calling thread handles a file descriptor."""
        return self._thread.is_reading

    def watch(self, descriptor: int, events: int, on_ready: OnReady) -> None:
        """Has a thread call `on_ready` when a file descriptor is ready; see `Executor.watch`."""
        self._on_ready[descriptor] = on_ready, events
        self._epoll.register(descriptor, events | select.EPOLLONESHOT)

    def watch_again(self, descriptor: int) -> None:
        """Has a thread handle a file descriptor when it is ready again."""
        if (handler := self._on_ready.get(descriptor)) is not None:
            with contextlib.suppress(OSError):  # unwatched meanwhile
                self._epoll.modify(descriptor, handler[1] | select.EPOLLONESHOT)

    def unwatch(self, descriptor: int) -> None:
        """Forgets a file descriptor; an OnReady of it may still run."""
        self._on_ready.pop(descriptor, None)
        with contextlib.suppress(OSError, ValueError):  # closed already, or the poller is
            self._epoll.unregister(descriptor)

    def wake(self) -> None:
        """Wakes one thread that waits, or else the next one that would."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Releases the descriptors of the poller itself; no thread may use it any more."""
        self._epoll.close()
        os.close(self._wake)

    def wait(self, seconds: float) -> int | None:
        """Waits for a descriptor or a wake-up, and calls the handler of the descriptor.

        Args:
            seconds: how long to wait.

        Returns:
            The descriptor if it should be waited for again, which is the caller's task (`keep` or `watch_again`);
            -1 if there is nothing more to do; None if nothing happened in this time.
        """
        if not (events := self._epoll.poll(seconds, 1)):
            return None
        ((descriptor, _),) = events
        handler = self._on_ready.get(descriptor)
        if handler is None:
            return -1
        thread = self._thread
        thread.is_reading = True
        try:
            again = handler[0]()
        except Exception:
            log.exception("a file descriptor cannot be handled, and is not watched any more")
            again = False
        finally:
            thread.is_reading = False
        now = time.monotonic()
        self.is_busy = now < self.last_ready + 0.001
        self.last_ready = now
        return descriptor if again else -1

    def keep(self, descriptor: int) -> None:
        """Lets the calling thread keep a descriptor, until `release` or until another thread takes it over."""
        self.kept[descriptor] = self.last_ready
        self._thread.descriptor = descriptor

    def release(self) -> None:
        """Has the descriptor that the calling thread keeps waited for again, if there is one."""
        descriptor = self._thread.descriptor
        if descriptor >= 0:
            self._thread.descriptor = -1
            if self.kept.pop(descriptor, None) is not None:
                self.watch_again(descriptor)

    def take_over(self, seconds: float) -> None:
        """Has the descriptors waited for again that other threads have kept for more than `seconds`."""
        latest = time.monotonic() - seconds
        for descriptor, since in list(self.kept.items()):
            if since <= latest and self.kept.pop(descriptor, None) is not None:
                self.watch_again(descriptor)
