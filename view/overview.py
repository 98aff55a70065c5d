"""The state of a job: those of all its workers, and the collectives in which some wait for others."""

import json
import logging
import math
import time
from typing import Any, cast

from ..errors import RpcError
from ..net.peer_text import printable
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.messages import MessageType, Request
from ..rpc.contracts.worker import WorkerInfo
from .extension import Viewing
from .schema import problem_of
from .snapshot import VERSION
from .stacks import stacks
from .timeline import merged_timeline

__all__ = ["overview_of", "stacks_of"]

log = logging.getLogger(__name__)

MAX_ANSWER_CHARACTERS = 1 << 23
"""Characters of the longest answer that is read."""


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
        "waits": viewing.waits.of(workers, time.time()),
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
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (RuntimeError, ValueError, RecursionError) as error:
        return None, printable(f"{type(error).__name__}: {error}", 500)
    return (value, None) if isinstance(value, kind) else (None, "its answer is malformed")
