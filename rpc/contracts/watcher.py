"""The contract of what is told what becomes of the other workers."""

from collections.abc import Callable

from .worker import WorkerInfo
from .worker_end import WorkerEnd

__all__ = ["WorkerWatcher"]


class WorkerWatcher:
    """Is told what becomes of the other workers. What a class does not override does nothing.

    - `note_…` is called at once, on the agent's event loop. For a suspect worker that is before anything comes by
      its next connection. It must not block. If `note_suspect` or `note_back` returns a function, that is run on a
      thread of the executor, after all watchers have noted the change; it may wait until the worker is back.
    - `on_worker_…` is called later, on a thread of the executor, when the earlier changes of the same worker are
      handled. It must not wait for other workers.
    """

    def note_joined(self, worker: WorkerInfo) -> None:
        """Notes a worker that has joined the group, maybe in the place of a lost one."""

    def note_suspect(self, worker: WorkerInfo, reason: str) -> Callable[[], None] | None:
        """Notes a worker that does not answer, for this reason, and may come back.

        What this worker has sent it until now, and what it has sent, may not have arrived.
        """

    def note_back(self, worker: WorkerInfo) -> Callable[[], None] | None:
        """Notes a suspect worker that answers again."""

    def note_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Notes the loss of a worker, and how it ended."""

    def on_worker_joined(self, worker: WorkerInfo) -> None:
        """Handles a worker that has joined."""

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Handles a worker that does not answer. `on_worker_back` or `on_worker_lost` follows.

        What the worker holds here, and what this worker holds there, stays valid until it is lost.
        """

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Handles a suspect worker that answers again."""

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Handles the loss of a worker."""
