"""Events of workers that join, leave, or do not answer for a while, and their delivery to subscribers.

An agent records each change of its group in the order in which it learns of it. A subscription begins with the
workers that are present at that moment and gets every change after it, so that no change is lost in between.
"""

import asyncio
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, final

from .worker import WorkerEnd, WorkerInfo, WorkerWatcher

__all__ = [
    "WorkerBack",
    "WorkerEvent",
    "WorkerEventHandle",
    "WorkerEventStream",
    "WorkerEvents",
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

    def __exit__(self, *_error: object) -> None:
        self.remove()

    @property
    def removed(self) -> bool:
        """Whether the callback has been removed."""
        return self._callback is None


@final
class WorkerEventStream:
    """An asynchronous iterator of what has become of workers since `worker_events` was called, in order."""

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self.workers = tuple(workers)
        """The workers present when `worker_events` was called, this one too, by id. None has a WorkerJoined."""
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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WorkerEvent:
        """Returns the next event; waits for it. Cancelling the wait loses no event.

        Raises:
            StopAsyncIteration: this worker has shut down, or the stream is closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits in it
                    loop.call_soon_threadsafe(woken.set)

            try:
                event = self.take(wake)
            except StopIteration:
                raise StopAsyncIteration from None
            if event is not None:
                return event
            await woken.wait()

    async def aclose(self) -> None:
        """Closes the stream, as dropping the last reference to it does."""
        self.close()

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


@final
class WorkerEvents(WorkerWatcher):
    """The present workers of one agent's group, and the subscribers to their changes.

    Callbacks run one after another, in the order of the events, on a thread of the executor.
    """

    def __init__(
        self, submit: Callable[[Callable[[], None]], None], connect: Callable[[WorkerInfo], None]
    ) -> None:
        """Args: submit: runs a function on a thread that may block. connect: begins to connect to a worker."""
        self._submit = submit
        self._connect = connect
        self._lock = threading.Lock()
        self._present: dict[int, WorkerInfo] = {}
        self._handles: list[WorkerEventHandle] = []
        self._streams: weakref.WeakSet[WorkerEventStream] = weakref.WeakSet()
        self._queue: deque[tuple[WorkerEventHandle, WorkerEvent]] = deque()
        self._is_delivering = False
        self._is_closed = False

    def open(self, workers: Sequence[WorkerInfo]) -> None:
        """Sets the workers that are present from the beginning, which are no events."""
        with self._lock:
            self._present.update((worker.wire_id, worker) for worker in workers)

    def note_joined(self, worker: WorkerInfo) -> None:
        """Records that a worker has joined."""
        self._record(WorkerJoined(worker))

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Records that a worker has shut down or is lost."""
        self._record(WorkerLeft(worker, end.reason))

    def note_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Records that a worker does not answer."""
        self._record(WorkerSuspect(worker, reason))

    def note_back(self, worker: WorkerInfo) -> None:
        """Records that a suspect worker answers again."""
        self._record(WorkerBack(worker))

    def subscribe(self, callback: Callable[[WorkerEvent], object]) -> WorkerEventHandle:
        """Calls a callback for every event from now on, until the returned handle is removed."""
        with self._lock:
            handle = WorkerEventHandle(callback, self._workers())
            self._handles = [each for each in self._handles if not each.removed]
            self._handles.append(handle)
        self._connect_to(handle.workers)
        return handle

    def stream(self) -> WorkerEventStream:
        """Returns a stream of every event from now on, for as long as it is referred to."""
        with self._lock:
            stream = WorkerEventStream(self._workers())
            if self._is_closed:
                stream.close()
            self._streams.add(stream)
        self._connect_to(stream.workers)
        return stream

    def close(self) -> None:
        """Starts no further callback, and closes the streams."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._handles.clear()
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, has readers of the streams raise an error."""
        for stream in list(self._streams):
            stream.leave_to_parent(why_useless)

    def _connect_to(self, workers: Sequence[WorkerInfo]) -> None:
        """Connects to workers, because only the loss of a connected worker is noticed."""
        for worker in workers:
            self._connect(worker)

    def _workers(self) -> list[WorkerInfo]:
        return [self._present[identifier] for identifier in sorted(self._present)]

    def _record(self, event: WorkerEvent) -> None:
        """Gives an event to all subscribers, unless its worker is not present any more."""
        worker = event.worker
        with self._lock:
            if isinstance(event, WorkerJoined):
                self._present[worker.wire_id] = worker
            elif worker.wire_id not in self._present:
                return
            elif isinstance(event, WorkerLeft):
                del self._present[worker.wire_id]
            if self._is_closed:
                return
            for stream in list(self._streams):
                stream.put(event)
            self._handles = [each for each in self._handles if not each.removed]
            self._queue.extend((handle, event) for handle in self._handles)
            if self._queue and not self._is_delivering:
                self._is_delivering = True
                self._submit(self._deliver)

    def _deliver(self) -> None:
        """Runs the queued callbacks until there are none."""
        while True:
            with self._lock:
                if not self._queue:
                    self._is_delivering = False
                    return
                handle, event = self._queue.popleft()
            handle(event)
            del handle, event
