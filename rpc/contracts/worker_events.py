"""Events of workers that join, leave, or do not answer for a while, as users see them."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, final

from .worker import WorkerInfo

__all__ = [
    "WorkerBack",
    "WorkerEvent",
    "WorkerEventBuffer",
    "WorkerEventHandle",
    "WorkerEventSource",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerSuspect",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker has joined the dynamic group."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """A worker has shut down or is lost; `reason` is that of a WorkerLostError."""

    worker: WorkerInfo
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSuspect:
    """A worker does not answer, and may come back; `reason` is that of a WorkerSuspectError."""

    worker: WorkerInfo
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """A worker that was suspect answers again."""

    worker: WorkerInfo


WorkerEvent = WorkerJoined | WorkerLeft | WorkerSuspect | WorkerBack


@final
class WorkerEventHandle:
    """A registered callback, until `remove`. As a context manager it is removed at the end of the block."""

    def __init__(self, callback: Callable[[WorkerEvent], object], workers: Sequence[WorkerInfo]) -> None:
        """Args: callback: called for each event. workers: those present when the callback was registered."""
        self.workers = tuple(workers)
        """The workers that were present at the registration, by id: the callback is not told of their joining."""
        self._callback: Callable[[WorkerEvent], object] | None = callback

    def remove(self) -> None:
        """Removes the callback: no call of it begins after this. Removing it again does nothing."""
        self._callback = None

    def __call__(self, event: WorkerEvent) -> None:
        """Runs the callback, if it has not been removed. What it raises is logged."""
        callback = self._callback
        if callback is None:
            return
        try:
            callback(event)
        except BaseException:  # a SystemExit too: the thread has other callbacks to run
            log.exception("a callback failed on %r", event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def removed(self) -> bool:
        """Whether the callback has been removed."""
        return self._callback is None


@final
class WorkerEventBuffer:
    """Holds events until their one reader takes them. Safe to use from any thread."""

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self.workers = tuple(workers)
        self._lock = threading.Lock()
        self._events: deque[WorkerEvent] = deque()
        self._wakers: list[Callable[[], None]] = []
        self._closed = False
        self._why_useless: Callable[[], Exception] | None = None

    def put(self, event: WorkerEvent) -> None:
        """Adds an event and wakes the reader."""
        with self._lock:
            if not self._closed:
                self._events.append(event)
            self._notify()

    def take(self, wake: Callable[[], None]) -> WorkerEvent | None:
        """Returns the next event; None if there is none yet: then `wake` is called once, when there may be one.

        Raises:
            StopIteration: all events have been taken, and there will be no others.
            Exception: in a forked child, that of `leave_to_parent`.
        """
        if self._why_useless is not None:
            raise self._why_useless()
        with self._lock:
            if self._events:
                return self._events.popleft()
            if self._closed:
                raise StopIteration
            self._wakers.append(wake)
            return None

    def close(self) -> None:
        """Accepts no more events, and wakes the reader."""
        with self._lock:
            self._closed = True
            self._notify()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, which gets no events, has `take` raise an error."""
        self._lock = threading.Lock()
        self._wakers.clear()
        self._why_useless = why_useless

    def _notify(self) -> None:
        for wake in self._wakers:
            wake()
        self._wakers.clear()


class WorkerEventSource(Protocol):
    """The changes of one agent's group, for subscribers.

    Every subscription begins with the workers that are present at that moment and gets every change after it.
    """

    def subscribe(self, callback: Callable[[WorkerEvent], object]) -> WorkerEventHandle:
        """Has a callback called for every event from now on, on a thread that runs incoming calls."""

    def buffer(self) -> WorkerEventBuffer:
        """Returns a buffer that gets every event from now on, for as long as somebody holds it."""
