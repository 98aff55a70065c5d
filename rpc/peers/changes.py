"""Tells all watchers of the changes of a peer's state, in one order."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ..contracts.watcher import WorkerWatcher
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd
from ..execution.executor import Executor

__all__ = ["Changes"]

Change = Callable[[WorkerWatcher], object]
"""Tells a watcher of a change."""

log = logging.getLogger(__name__)


@final
class Changes:
    """The changes of one peer's state. Used on the event loop."""

    def __init__(self, worker: WorkerInfo, watchers: Sequence[WorkerWatcher], executor: Executor) -> None:
        """Tells watchers in their order: see WorkerWatcher. Others may be added before there is a connection.

        The threads of the executor handle what may take its time.
        """
        self._worker = worker
        self._watchers = watchers
        self._executor = executor
        self._lock = threading.Lock()
        self._handling: deque[Change] = deque()
        """Those that are being handled, in their order. Guarded by the lock."""

    def joined(self) -> None:
        """Tells that the worker has joined."""
        worker = self._worker
        self._tell(lambda each: each.note_joined(worker), lambda each: each.on_worker_joined(worker))

    def suspect(self, reason: str) -> None:
        """Tells that the worker does not answer."""
        worker = self._worker
        self._tell(
            lambda each: each.note_suspect(worker, reason), lambda each: each.on_worker_suspect(worker, reason)
        )

    def back(self) -> None:
        """Tells that the worker answers again."""
        worker = self._worker
        self._tell(lambda each: each.note_back(worker), lambda each: each.on_worker_back(worker))

    def lost(self, end: WorkerEnd) -> None:
        """Tells that the worker is lost."""
        worker = self._worker
        self._tell(lambda each: each.note_lost(worker, end), lambda each: each.on_worker_lost(worker, end))

    def _tell(self, note: Change, handle: Change) -> None:
        tasks = [self._try(note, watcher) for watcher in self._watchers]
        for task in tasks:  # when all have noted it: what runs then may make calls
            if callable(task):
                self._executor.submit(task)
        with self._lock:
            self._handling.append(handle)
            is_first = len(self._handling) == 1
        if is_first:
            self._executor.submit(self._handle_each)

    def _handle_each(self) -> None:
        """Runs on a thread of the executor."""
        while True:
            for watcher in self._watchers:
                self._try(self._handling[0], watcher)
            with self._lock:
                self._handling.popleft()
                if not self._handling:
                    return

    def _try(self, change: Change, watcher: WorkerWatcher) -> object:
        """Tells a watcher of a change. What it raises must not keep the others from being told."""
        try:
            return change(watcher)
        except Exception:
            log.exception("a change of worker %s cannot be handled", self._worker.name)
            return None
