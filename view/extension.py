"""Answers other workers that ask what this one does."""

import json
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, final

import psutil

from ..logs import Tail
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from .snapshot import snapshot
from .stacks import stacks
from .waits import Waits

__all__ = ["Viewing"]

EVENTS_S = 60.0
"""Seconds for which events are shown."""

MAX_EVENTS = 256

LOG_LINES = 20
"""Lines of the log that are shown."""


@final
class Viewing(Extension):
    """What one agent shows of itself. It has no hooks on messages."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.waits = Waits()
        """Finds who waits for whom, when this worker asks the others."""
        self._lost: deque[str] = deque(maxlen=MAX_EVENTS)
        """The names of the workers that were lost, the last ones."""
        self._log = Tail(LOG_LINES, without="view")  # where the page is: who sees it knows
        self._process = psutil.Process()
        self._process.cpu_percent()  # from which the first answer counts
        self._malformed: set[int] = set()
        """The workers whose last state was malformed, by wire id."""

    def handlers(self) -> Mapping[MessageType.ValueType, Handler]:
        """Returns the handlers of questions for the state and the stacks of this worker."""
        return {
            MessageType.VIEW_SNAPSHOT: Handler(
                self._answer_snapshot, description="the question for the state of worker"
            ),
            MessageType.VIEW_STACKS: Handler(
                self._answer_stacks, description="the question for the stacks of worker"
            ),
        }

    def on_worker_suspect(self, worker: WorkerInfo, reason: str) -> None:
        """Records a worker that does not answer."""
        self._record("suspect", worker, reason)

    def on_worker_back(self, worker: WorkerInfo) -> None:
        """Records a suspect worker that answers again."""
        self._record("back", worker, "")

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Records a worker that is lost."""
        self._malformed.discard(worker.wire_id)
        if not end.orderly and worker.name not in self._lost:
            self._lost.append(worker.name)
        self._record("left" if end.orderly else "lost", worker, end.reason)

    def on_worker_joined(self, worker: WorkerInfo) -> None:
        """Records a worker that joins, or that joins again under the name of a lost one."""
        has_returned = worker.name in self._lost
        if has_returned:
            self._lost.remove(worker.name)
        self._record("returned" if has_returned else "joined", worker, "")

    def snapshot(self) -> dict[str, Any]:
        """Returns the state of this worker, as JSON values."""
        now = time.time()
        events = [each for each in list(self._events) if now - each["time"] < EVENTS_S]
        return snapshot(self.agent, self._process, events, self._log.lines())

    def close(self) -> None:
        """Keeps no more lines of the log."""
        self._log.close()

    def is_news(self, worker: WorkerInfo, *, is_malformed: bool) -> bool:
        """Returns whether the state of a worker is malformed, and was not when it was asked before."""
        was_malformed = worker.wire_id in self._malformed
        if is_malformed:
            self._malformed.add(worker.wire_id)
        else:
            self._malformed.discard(worker.wire_id)
        return is_malformed and not was_malformed

    def _record(self, event: str, worker: WorkerInfo, reason: str) -> None:
        self._events.append({"time": time.time(), "event": event, "worker": worker.name, "reason": reason})

    # JSON, so that a text is all that has to be unpickled.

    def _answer_snapshot(self, message: Incoming) -> str:  # noqa: ARG002
        return json.dumps(self.snapshot())

    def _answer_stacks(self, message: Incoming) -> str:  # noqa: ARG002
        return json.dumps(stacks())
