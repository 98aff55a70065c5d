"""The state of a job: each worker answers with its own, one asks all, and finds who waits for whom."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, cast, final

import psutil

from ..errors import RpcError
from ..logs import Tail
from ..net.peer_text import printable
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import Handler, Incoming, MessageType, Request
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from .snapshot import VERSION, problem_of, snapshot, stacks
from .timeline import merged_timeline
from .waits import Waits

__all__ = ["Viewing", "overview_of", "stacks_of"]

EVENTS_S = 60.0
"""Seconds for which events are shown."""

MAX_EVENTS = 256

LOG_LINES = 20
"""Lines of the log that are shown."""

log = logging.getLogger(__name__)

MAX_ANSWER_CHARACTERS = 1 << 23
"""Characters of the longest answer that is read."""


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
        self._left: set[str] = set()
        """The names of those that have left on purpose."""
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
        if end.orderly:
            self._left.add(worker.name)
        elif worker.name not in self._lost:
            self._lost.append(worker.name)
        self._record("left" if end.orderly else "lost", worker, end.reason)

    def on_worker_joined(self, worker: WorkerInfo) -> None:
        """Records a worker that joins, or that joins again under the name of a lost one."""
        has_returned = worker.name in self._lost
        if has_returned:
            self._lost.remove(worker.name)
        self._left.discard(worker.name)
        self._record("returned" if has_returned else "joined", worker, "")

    def snapshot(self) -> dict[str, Any]:
        """Returns the state of this worker, as JSON values."""
        now = time.time()
        events = [each for each in list(self._events) if now - each["time"] < EVENTS_S]
        return snapshot(self.agent, self._process, events, self._log.lines(), self._left.copy())

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


def overview_of(agent: RpcAgent, timeout: float = 2.0) -> dict[str, Any]:
    """Asks all workers of an agent's group for their state, at the same time, and returns what they answer.

    Who takes longer than `timeout` seconds is in the result without its state. docs/view.md describes the values.
    """
    began = time.time()
    viewing = agent.extension(Viewing)
    asked = [
        (worker, None if worker.wire_id == agent.info.wire_id else _ask(agent, worker, timeout))
        for worker in agent.workers()
    ]
    workers = []
    for worker, answer in asked:
        state, error = (viewing.snapshot(), None) if answer is None else _read_state(viewing, worker, answer)
        workers.append({"name": worker.name, "id": worker.id, "error": error, "state": state})
    return {
        "version": VERSION,
        "time": began,
        "seconds": time.time() - began,
        "asked_by": agent.info.name,
        "workers": workers,
        "timeline": merged_timeline(workers, began),
        "waits": viewing.waits.of(workers, began),
    }


def stacks_of(agent: RpcAgent, name: str, timeout: float = 5.0) -> list[dict[str, Any]]:
    """Returns the stacks of the threads of a worker, as JSON values.

    Raises:
        UnknownWorkerError: there is no worker of this name.
        RpcError: it does not answer.
    """
    worker = agent.worker(name)
    if worker.wire_id == agent.info.wire_id:
        return stacks()
    found, error = _read(agent.request(worker, Request(MessageType.VIEW_STACKS, None, timeout=timeout)), list)
    if found is None:
        raise RpcError(f"worker {name!r} does not show its stacks: {error}")
    return cast(list[dict[str, Any]], found)


def _read_state(viewing: Viewing, worker: WorkerInfo, answer: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Returns the state that a worker answers with, or why there is none. Whoever shows it need not check it."""
    state, error = _read(answer, dict)
    if state is None:
        return None, error
    if state.get("version") != VERSION:
        return None, f"its state has version {printable(state.get('version'))}, not {VERSION}"
    problem = problem_of(state)
    if viewing.is_news(worker, is_malformed=problem is not None):
        log.warning("the state of worker %s is malformed, and left out: %s", worker.name, problem)
    return (state, None) if problem is None else (None, f"its state is malformed: {problem}")


def _ask(agent: RpcAgent, worker: WorkerInfo, timeout: float) -> Any:
    try:
        return agent.request(worker, Request(MessageType.VIEW_SNAPSHOT, None, timeout=timeout))
    except RpcError as error:
        return error


def _finite(text: str) -> float:
    """Returns a number of an answer. Raises ValueError if it is none that JSON has, which nobody could read."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{printable(text)} is no number")
    return number


def _read(answer: Any, kind: type) -> tuple[Any, str | None]:
    """Returns the JSON that a worker answers with, or why there is none."""
    try:
        if isinstance(answer, RpcError):
            raise answer
        text = answer.wait()
        if not isinstance(text, str) or len(text) > MAX_ANSWER_CHARACTERS:
            return None, "its answer is malformed, or too long"
        text.encode()  # half of a surrogate pair is no text that can be sent on
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (RuntimeError, ValueError, RecursionError) as error:
        return None, printable(f"{type(error).__name__}: {error}", 500)
    return (value, None) if isinstance(value, kind) else (None, "its answer is malformed")
