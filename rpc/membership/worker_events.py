"""Delivers the joining and leaving of workers to subscribers.

An agent records each change of its group in the order in which it learns of it. A subscription begins with the
workers that are present at that moment and gets every change after it, so that no change is lost in between.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ..contracts.watcher import WorkerWatcher
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..contracts.worker_events import (
    WorkerBack,
    WorkerEvent,
    WorkerEventBuffer,
    WorkerEventHandle,
    WorkerJoined,
    WorkerLeft,
    WorkerSuspect,
)

__all__ = ["WorkerEvents"]


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
        self._buffers: weakref.WeakSet[WorkerEventBuffer] = weakref.WeakSet()
        self._queue: deque[tuple[WorkerEventHandle, WorkerEvent]] = deque()
        self._is_delivering = False
        self._is_closed = False

    def open(self, workers: Sequence[WorkerInfo]) -> None:
        """Sets the workers that are present from the beginning, which are no events."""
        with self._lock:
            self._present.update((worker.wire_id, worker) for worker in workers)

    def note_joined(self, worker: WorkerInfo) -> None:
        """Records that a worker has joined."""
        with self._lock:
            self._present[worker.wire_id] = worker
            self._record(WorkerJoined(worker))

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Records that a worker has shut down or is lost."""
        with self._lock:
            if self._present.pop(worker.wire_id, None) is not None:
                self._record(WorkerLeft(worker, end.reason))

    def note_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Records that a worker does not answer."""
        with self._lock:
            if worker.wire_id in self._present:
                self._record(WorkerSuspect(worker, reason))

    def note_back(self, worker: WorkerInfo) -> None:
        """Records that a suspect worker answers again."""
        with self._lock:
            if worker.wire_id in self._present:
                self._record(WorkerBack(worker))

    def subscribe(self, callback: Callable[[WorkerEvent], object]) -> WorkerEventHandle:
        """Calls a callback for every event from now on, until the returned handle is removed."""
        with self._lock:
            handle = WorkerEventHandle(callback, self._workers())
            self._handles = [each for each in self._handles if not each.removed]
            self._handles.append(handle)
        self._connect_to(handle.workers)
        return handle

    def buffer(self) -> WorkerEventBuffer:
        """Returns a buffer that gets every event from now on, for as long as it is referred to."""
        with self._lock:
            buffer = WorkerEventBuffer(self._workers())
            if self._is_closed:
                buffer.close()
            self._buffers.add(buffer)
        self._connect_to(buffer.workers)
        return buffer

    def close(self) -> None:
        """Starts no further callback, and closes the buffers."""
        with self._lock:
            self._is_closed = True
            self._queue.clear()
            self._handles.clear()
            buffers = list(self._buffers)
        for buffer in buffers:
            buffer.close()

    def leave_to_parent(self, why_useless: Callable[[], Exception]) -> None:
        """In a forked child, has readers of the buffers raise an error."""
        for buffer in list(self._buffers):
            buffer.leave_to_parent(why_useless)

    def _connect_to(self, workers: Sequence[WorkerInfo]) -> None:
        """Connects to workers, because only the loss of a connected worker is noticed."""
        for worker in workers:
            self._connect(worker)

    def _workers(self) -> list[WorkerInfo]:
        return [self._present[identifier] for identifier in sorted(self._present)]

    def _record(self, event: WorkerEvent) -> None:
        """Gives an event to all subscribers. Called with the lock."""
        if self._is_closed:
            return
        for buffer in list(self._buffers):
            buffer.put(event)
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
