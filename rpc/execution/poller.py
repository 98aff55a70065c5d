"""How threads wait for file descriptors: in epoll, on behalf of the executor, or for what they need themselves.

A descriptor is given to one thread at a time: when it is ready, it is not waited for again until that thread says
so. A thread that runs functions which it has read from a descriptor may keep it meanwhile; other threads take it
over if that lasts too long: see `Watch`. A thread that waits for what a descriptor brings may read it itself.

Before it sleeps, a thread busy-polls for a moment: it looks again and again, since to be woken takes longer.
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, final

from ...errors import RpcError
from .ctrl_c import ctrl_c, interruptible
from .interruptions import MAX_SLICE_S

__all__ = [
    "MAX_WATCHERS",
    "READABLE",
    "WATCH_INTERVAL_S",
    "WRITABLE",
    "Expected",
    "OnReady",
    "Poller",
    "SharedDescriptor",
    "SocketWaiter",
    "Spinner",
    "Wakeable",
    "Watch",
]

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT

_SLICE_MS = round(1000 * MAX_SLICE_S)
"""Milliseconds after which a wait begins again: see `acquire` in interruptions.py."""

MAX_LOOK_S = 3e-4
"""Seconds that one look may take. If it takes longer, others need the interpreter or the processor."""

MAX_SKIPPED = 64
"""Waits in a row, at most, in which the thread does not look again and again."""

Events = list[tuple[int, int]]
"""Descriptors that are ready, with the events of each."""

WATCH_INTERVAL_S = 0.001
"""Seconds that a thread may keep a socket, and what it has read, while it runs a function; until the next look."""

MAX_WATCH_INTERVAL_S = 0.008
"""Seconds between two looks after some that have found nothing to take over: to look, a thread needs the
interpreter, and the others have to wait for it."""

WATCH_FOR_S = 0.02
"""Seconds after the last busy socket in which a waiting thread looks after the others."""

MAX_WATCHERS = 2
"""Waiting threads that look after the others, at most: the one that looks next may also be the one that reads."""

log = logging.getLogger(__name__)

OnReady = Callable[[], bool]
"""Handles a file descriptor that is ready; returns whether to wait for it again. Must not block or raise.

What it submits to the executor runs on the same thread after it, if the thread has nothing else to do."""


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
        """Returns what `poll(0)` says is ready: nothing if nothing is in time, or if `stop` says so first."""
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
        """Raises OSError if no descriptor is left."""
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


class SharedDescriptor(Protocol):
    """A descriptor that is read by the thread that needs what it brings, or else by the poller's threads."""

    descriptor: int

    reading: threading.Lock
    """Held by the thread that reads. `end_reading` releases it."""

    def read(self) -> bool:
        """Reads a chunk and handles it; returns whether to read on."""

    def end_reading(self) -> None:
        """Lets other threads read."""

    def on_readable(self) -> bool:
        """Reads a chunk and handles it: its OnReady. Returns False if another thread reads, or none is to."""


class Expected(Protocol):
    """What a thread waits for that reads a descriptor itself."""

    is_completing: bool
    """Whether it is there, or about to be."""


class _ThreadState(threading.local):
    """What the poller keeps about the calling thread."""

    is_reading = False
    """Whether it runs an OnReady."""
    descriptor = -1
    """The file descriptor that it keeps; -1 if there is none."""
    must_not_wait = False
    """Whether what it waits for would need it: see `forbid_waits_here`."""

    def __init__(self, busy_poll: float) -> None:
        self.spinner = Spinner(busy_poll)
        self.poll = select.poll()
        """Looks at the descriptor that the thread has kept last."""
        self.polled = -1
        self.waiter: SocketWaiter | None = None
        self.reads_here: list[SharedDescriptor] = []
        """What the thread reads by `read_here`; empty once it has been given back."""
        self.waits_here = False
        """Whether it waits for that, and has not begun to read."""
        self.expected: Expected | None = None
        """What it reads for."""


@final
class Poller:
    """One epoll for many threads. Safe to use from any thread."""

    def __init__(self, busy_poll: float) -> None:
        self._epoll = select.epoll()
        self._on_ready: dict[int, tuple[OnReady, int]] = {}
        """By file descriptor: what handles it, and the events that it is watched for."""
        self._busy_poll = busy_poll
        self._why_useless: Callable[[], Exception] | None = None
        """See `leave_to_parent`."""
        self.here = _ThreadState(busy_poll)
        """What is kept about the calling thread."""
        self.kept: dict[int, float] = {}
        """The file descriptors that threads keep, and since when, by the monotonic clock."""
        self.last_ready = 0.0
        """When a file descriptor was ready last, by the monotonic clock."""
        self.is_busy = False
        """Whether the last two times that a descriptor was ready were less than a millisecond apart."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered: each write wakes one thread, and nobody has to read.
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLET)
        self.wake: Callable[[], None] = partial(os.eventfd_write, self._wake, 1)
        """Wakes one thread that waits, or else the next one that would."""
        # Closed only when no thread calls `wake` any more.
        weakref.finalize(self.wake, os.close, self._wake).atexit = False
        self.handed_over: deque[tuple[int, Callable[[], object]]] = deque()
        """What the next thread that is woken calls: a descriptor, -1 for none, and its handler."""

    @property
    def waiter(self) -> SocketWaiter | None:
        """What the calling thread waits by for a descriptor that it reads itself; None if none can be made."""
        if self.here.waiter is None:
            with contextlib.suppress(OSError):
                self.here.waiter = SocketWaiter(self._busy_poll)
        return self.here.waiter

    def watch(self, descriptor: int, events: int, on_ready: OnReady) -> None:
        """Has a thread call `on_ready` when a file descriptor is ready; see `Executor.watch`."""
        self._on_ready[descriptor] = on_ready, events
        self._epoll.register(descriptor, events | select.EPOLLONESHOT)

    def watch_again(self, descriptor: int) -> None:
        """Has a thread handle a file descriptor when it is ready again. Does nothing if it is not watched."""
        if (handler := self._on_ready.get(descriptor)) is not None:
            try:  # no context manager, which is three calls: this is on the way of each message
                self._epoll.modify(descriptor, handler[1] | select.EPOLLONESHOT)
            except (OSError, ValueError):  # it has been closed just now, or the poller has
                return

    def unwatch(self, descriptor: int) -> None:
        """Forgets a file descriptor; an OnReady of it may still run."""
        self._on_ready.pop(descriptor, None)
        with contextlib.suppress(OSError, ValueError):  # closed already, or the poller is
            self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Releases the descriptors of the poller itself; no thread may use it any more."""
        self.wake = _do_nothing
        self.handed_over.clear()
        self._epoll.close()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, which has the epoll of its parent: uses it no more, and has waits raise an error."""
        self.close()
        self.kept.clear()
        self._on_ready.clear()
        self.here = _ThreadState(self._busy_poll)
        self._why_useless = why_useless

    def wait(self, seconds: float | None) -> int | None:
        """Waits so many seconds, None for ever, for a descriptor or a wake-up; calls the descriptor's handler.

        Returns:
            The descriptor if it should be waited for again, which is the caller's task (`keep` or `watch_again`);
            -1 if there is nothing more to do; None if nothing happened in this time.
        """
        if not (events := self._epoll.poll(seconds, 1)):
            return None
        ((descriptor, _),) = events
        handler = self._on_ready.get(descriptor)
        on_ready: Callable[[], object]
        if handler is not None:
            on_ready = handler[0]
        elif self.handed_over:
            descriptor, on_ready = self._next_handed_over()
        else:
            return -1
        return descriptor if self._handle(on_ready) else -1

    def _handle(self, on_ready: Callable[[], object]) -> bool:
        """Calls a handler; returns whether its descriptor is to be waited for again."""
        thread = self.here
        thread.is_reading = True
        try:
            again = bool(on_ready())
        except Exception:
            log.exception("a file descriptor cannot be handled, and is not watched any more")
            again = False
        finally:
            thread.is_reading = False
        now = time.monotonic()
        self.is_busy = now < self.last_ready + 0.001
        self.last_ready = now
        return again

    def _next_handed_over(self) -> tuple[int, Callable[[], object]]:
        try:
            taken = self.handed_over.popleft()
        except IndexError:  # another thread has taken it
            return -1, lambda: False
        if self.handed_over:
            self.wake()
        return taken

    def read_here(self, source: SharedDescriptor, waiter: SocketWaiter, expected: Expected) -> None:
        """Has the calling thread read a descriptor until what it expects is there, unless another thread reads.

        The handler of a signal that waits for a worker itself gives the descriptor back before it does.
        """
        descriptor = source.descriptor
        if not source.reading.acquire(blocking=False):
            return
        thread = self.here
        here = [source]
        outer, thread.reads_here, thread.expected = (thread.reads_here, thread.expected), here, expected
        try:
            if descriptor not in self._on_ready:
                return
            self.kept.pop(descriptor, None)  # a thread that has kept it looks at it no longer
            try:
                self._epoll.modify(descriptor, select.EPOLLONESHOT)  # and no other one does
            except FileNotFoundError:  # `watch` is about to register it
                return
            while not expected.is_completing:
                thread.waits_here = True
                is_readable = waiter.wait(descriptor)
                thread.waits_here = False
                # Else it was released, perhaps for something earlier that the thread did not wait for.
                if not here or (is_readable and not source.read()):
                    return
        finally:
            thread.waits_here = False
            thread.reads_here, thread.expected = outer
            if here:
                self._end_reading(source)

    def _end_reading(self, source: SharedDescriptor) -> None:
        """Has the poller's threads read a descriptor again."""
        source.end_reading()  # first: a thread that finds it held leaves the descriptor alone
        handler = self._on_ready.get(source.descriptor)
        if handler is not None and handler[0] == source.on_readable:
            try:  # noqa: SIM105 - in each call, and `suppress` makes three more
                self._epoll.modify(source.descriptor, handler[1] | select.EPOLLONESHOT)
            except (OSError, ValueError):  # it has been closed just now, or the poller has
                pass

    def forbid_waits_here(self) -> None:
        """Has waits of the calling thread, that of the event loop, raise instead of hanging."""
        self.here.must_not_wait = True

    def stop_reading_here(self) -> None:
        """Gives back what the calling thread reads by `read_here`: a signal handler in it is about to wait.

        Raises:
            RpcError: this is the event loop's thread, without which nothing that it waits for can happen; or this
                thread has been interrupted while it was reading.
            Exception: in a forked child, that of `leave_to_parent`.
        """
        if self._why_useless is not None:
            raise self._why_useless()
        thread = self.here
        if thread.must_not_wait:
            raise RpcError(
                f"thread {threading.current_thread().name!r} cannot wait for other workers, because it receives "
                "what they send: this is a callback or a finalizer (__del__) that runs on it. Use rpc_async and "
                "add_done_callback instead of rpc_sync and wait, or wait on another thread"
            )
        if not thread.reads_here:
            return
        if not thread.waits_here:
            raise RpcError(
                "the handler of a signal, or a finalizer (__del__), cannot wait for other workers where it has "
                "interrupted gradwire, which reads what they send. Have another thread make the call"
            )
        thread.waiter = None  # the handler waits by another one, or it would take what wakes this one
        self._end_reading(thread.reads_here.pop())

    def hand_over(self, descriptor: int, on_ready: OnReady) -> None:
        """Has a thread handle a descriptor at once, whether it is ready or not."""
        self.handed_over.append((descriptor, on_ready))
        self.wake()

    def keep(self, descriptor: int) -> None:
        """Lets the calling thread keep a descriptor, until `release` or until another thread takes it over."""
        self.kept[descriptor] = self.last_ready
        self.here.descriptor = descriptor

    def spin(self, stop: Callable[[], object]) -> bool:
        """Looks again and again at the descriptor that the calling thread keeps, and handles it if it is ready.

        Returns whether it was; it was not if `stop` says so first. The thread keeps it.
        """
        thread = self.here
        descriptor = thread.descriptor
        handler = self._on_ready.get(descriptor)
        if handler is None:
            return False
        if descriptor != thread.polled:
            if thread.polled >= 0:
                thread.poll.unregister(thread.polled)
            thread.poll.register(descriptor, select.POLLIN)
            thread.polled = descriptor
        kept = self.kept
        ready = thread.spinner.spin(thread.poll.poll, lambda: descriptor not in kept or stop())
        if not ready or descriptor not in kept:
            return False
        if self._handle(handler[0]):
            self.keep(descriptor)
        else:
            self.release()  # which has it waited for: the entry in `kept` may be another thread's by now
        return True

    def release(self) -> None:
        """Has the descriptor that the calling thread keeps waited for again, if there is one."""
        descriptor = self.here.descriptor
        if descriptor >= 0:
            self.here.descriptor = -1
            if self.kept.pop(descriptor, None) is not None:
                self.watch_again(descriptor)

    def is_kept_for(self, seconds: float) -> bool:
        """Returns whether a thread has kept a descriptor for more than `seconds`."""
        return min(self.kept.copy().values(), default=math.inf) <= time.monotonic() - seconds

    def take_over(self, seconds: float) -> None:
        """Has the descriptors waited for again that other threads have kept for more than `seconds`."""
        latest = time.monotonic() - seconds
        for descriptor, since in self.kept.copy().items():
            if since <= latest and self.kept.pop(descriptor, None) is not None:
                self.watch_again(descriptor)


def _do_nothing() -> None:
    """Takes the place of `wake` when there are no threads any more."""


@final
class Watch:
    """Tells waiting threads when to look after the others. Safe to use from any thread."""

    def __init__(self, poller: Poller, has_undone: Callable[[], bool]) -> None:
        """Nothing has been busy yet. `has_undone` tells whether a thread may have left undone what is queued."""
        self._poller = poller
        self._has_undone = has_undone
        self.until = 0.0
        """When it is long enough ago that a socket was busy, by the monotonic clock."""
        self._interval = WATCH_INTERVAL_S
        """Seconds until the next look. Not reset by each message: most functions take less time."""

    def extend(self) -> None:
        """Notes that the socket that was ready last is busy."""
        self.until = self._poller.last_ready + WATCH_FOR_S

    def wait(self, poll: Callable[[float], bool]) -> bool:
        """Has the calling thread wait, and look after the others now and then; returns whether something happened.

        If not, there is something to do for a thread that watches, or nothing to watch any more. What `poll` does
        is wait for some seconds; it returns whether something happened in them.
        """
        while not poll(self._interval):
            if self._has_undone() or self._poller.is_kept_for(WATCH_INTERVAL_S):
                self._interval = WATCH_INTERVAL_S
                return False
            if not self._poller.kept and time.monotonic() >= self.until:
                return False
            self._interval = min(2 * self._interval, MAX_WATCH_INTERVAL_S)
        return True
