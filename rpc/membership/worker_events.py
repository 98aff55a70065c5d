"""Workers that join and leave, as events.

An agent records each change of its group in the order in which it learns of it. Every subscription begins with the
workers that are present at that moment, and gets every change after it, so that nothing falls in between.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ..contracts.worker import WorkerInfo
from ..contracts.worker_events import (
    WorkerEvent,
    WorkerEventBuffer,
    WorkerEventHandle,
    WorkerJoined,
    WorkerLeft,
)

__all__ = ["WorkerEvents"]


@final
class WorkerEvents:
    """The workers of one agent's group that are present, and who is told when that changes.

    `joined` and `left` are called on the agent's event loop and do not block. Callbacks run one after another, in
    the order of events, on a thread of the executor.
    """

    def __init__(
        self, submit: Callable[[Callable[[], None]], None], connect: Callable[[WorkerInfo], None]
    ) -> None:
        """Args: submit: runs a function on a thread that may block. connect: connects to a worker, at once."""
        self._submit = submit
        self._connect = connect
        self._lock = threading.Lock()
        self._present: dict[int, WorkerInfo] = {}
        self._handles: list[WorkerEventHandle] = []
        self._buffers: weakref.WeakSet[WorkerEventBuffer] = weakref.WeakSet()
        self._queue: deque[tuple[WorkerEventHandle, WorkerEvent]] = deque()
        self._running = False
        self._closed = False

    def open(self, workers: Sequence[WorkerInfo]) -> None:
        """Sets the workers that are there from the beginning."""
        with self._lock:
            self._present.update((worker.id, worker) for worker in workers)

    def joined(self, worker: WorkerInfo) -> None:
        """A worker has joined."""
        with self._lock:
            self._present[worker.id] = worker
            self._record(WorkerJoined(worker))

    def left(self, worker: WorkerInfo, reason: str) -> None:
        """A worker has shut down or is lost."""
        with self._lock:
            if self._present.pop(worker.id, None) is not None:
                self._record(WorkerLeft(worker, reason))

    def subscribe(self, callback: Callable[[WorkerEvent], object]) -> WorkerEventHandle:
        """Has a callback called for every event from now on."""
        with self._lock:
            handle = WorkerEventHandle(callback, self._workers())
            self._handles = [each for each in self._handles if not each.removed]
            self._handles.append(handle)
        self._watch(handle.workers)
        return handle

    def buffer(self) -> WorkerEventBuffer:
        """Returns a buffer that gets every event from now on, for as long as somebody holds it."""
        with self._lock:
            buffer = WorkerEventBuffer(self._workers())
            if self._closed:
                buffer.close()
            self._buffers.add(buffer)
        self._watch(buffer.workers)
        return buffer

    def close(self) -> None:
        """Has no further callback begin, and ends the buffers."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._handles.clear()
            buffers = list(self._buffers)
        for buffer in buffers:
            buffer.close()

    def _watch(self, workers: Sequence[WorkerInfo]) -> None:
        """Connects to the workers: the loss of one to which there is no connection would not show."""
        for worker in workers:
            self._connect(worker)

    def _workers(self) -> list[WorkerInfo]:
        return [self._present[identifier] for identifier in sorted(self._present)]

    def _record(self, event: WorkerEvent) -> None:
        """Called with the lock."""
        if self._closed:
            return
        for buffer in list(self._buffers):
            buffer.put(event)
        self._handles = [each for each in self._handles if not each.removed]
        self._queue.extend((handle, event) for handle in self._handles)
        if self._queue and not self._running:
            self._running = True
            self._submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                handle, event = self._queue.popleft()
            handle(event)
            del handle, event
