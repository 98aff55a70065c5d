"""Requests whose answers are not known yet, although no thread is busy with them.

Such as calls of functions that return futures. When nobody waits for an answer any more, it is given up: a future
may never be completed, and a graceful shutdown would wait for it for ever.
"""

import time
from dataclasses import dataclass
from typing import final

from ..contracts.messages import Handler, Incoming
from ..contracts.worker import WorkerInfo

__all__ = ["DeferredAnswer", "DeferredAnswers"]


@final
@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """What it takes to answer a request later.

    deadline: when its caller does not wait any longer, as time of `time.monotonic`; None for never.
    """

    request: Incoming
    handler: Handler
    deadline: float | None


@final
class DeferredAnswers:
    """Decides between the answer of a request and the end of the wait for it: only one of them happens.

    Takes no lock: each step is one operation on a dict.
    """

    def __init__(self) -> None:
        self._deferred: dict[tuple[int, int], DeferredAnswer] = {}
        """By worker and id."""
        self._lost: set[int] = set()

    def add(self, request: Incoming, handler: Handler) -> tuple[int, int]:
        """Registers a request; returns its key."""
        timeout = request.envelope.timeout_ms
        deadline = time.monotonic() + timeout / 1000 if timeout else None
        key = request.source.wire_id, request.envelope.id
        self._deferred[key] = DeferredAnswer(request, handler, deadline)
        return key

    def take(self, key: tuple[int, int]) -> DeferredAnswer | None:
        """Takes a request out, to answer it or to give it up; None if that has been done."""
        return self._deferred.pop(key, None)

    def expired(self) -> list[tuple[int, int]]:
        """Returns the keys of the requests whose callers do not wait any longer."""
        now = time.monotonic()
        return [key for key, each in self._deferred.copy().items() if each.deadline and each.deadline <= now]

    def seconds_left(self) -> float | None:
        """Returns the time until the next one expires; None for never."""
        deadlines = [each.deadline for each in self._deferred.copy().values() if each.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def of_lost(self, worker: WorkerInfo) -> list[tuple[int, int]]:
        """Returns the keys of the requests of a worker that is lost; `is_lost` says so of later ones."""
        self._lost.add(worker.wire_id)
        return [key for key in self._deferred.copy() if key[0] == worker.wire_id]

    def is_lost(self, worker: WorkerInfo) -> bool:
        """Returns whether a worker is lost."""
        return worker.wire_id in self._lost

    def __len__(self) -> int:
        return len(self._deferred)
