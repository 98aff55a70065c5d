"""Postpones the calls of workers that do not read what this worker sends them.

Answers never wait, and as many of them may be queued for a worker as it has calls in flight, whatever their size.
So when too many bytes are queued for a worker, its calls that have not begun to run wait until half of those are
sent, and so do the generators of its streams, whatever window it has asked for.

These calls do not keep anything from being read. So they wait for the other worker's reading and nothing else, and
cannot close a circle of waits; docs/architecture.md has the argument.
"""

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import final

from ...errors import LimitReachedError
from ..contracts.options import FlowControlOptions
from ..contracts.worker import WorkerInfo
from .network import Network

__all__ = ["MIN_ANSWER_BYTES", "PostponedRequests"]

MIN_ANSWER_BYTES = 1 << 10
"""Bytes of the smallest answer that is counted. The number of the others is bounded by the calls in flight."""

MAX_LOOK_BYTES = 4 << 20
"""Bytes of answers to a worker after which its queue is looked at, at most; a sixteenth of a small bound."""

MAX_CALLS_FACTOR = 2
"""Calls of one worker that are postponed, at most: `max_in_flight`, which nesting may exceed, times this."""

CHECK_INTERVAL_S = 0.02
"""Seconds between two looks at the queues of workers whose calls wait."""


@final
class PostponedRequests:
    """The calls of all workers for which too much is queued. Safe to use from any thread."""

    def __init__(self, options: FlowControlOptions, network: Network) -> None:
        """Postpones nothing yet.

        Args:
            options: the bounds.
            network: has the queues.
        """
        self._max_calls = MAX_CALLS_FACTOR * max(options.max_in_flight, options.max_received)
        self._max_bytes = options.max_unsent_bytes
        self._max_total_bytes = options.max_total_unsent_bytes
        self._look_bytes = min(MAX_LOOK_BYTES, self._max_bytes // 16)
        self._network = network
        self._lock = threading.Lock()
        self.waiting: dict[int, list[Callable[[], None]]] = {}
        """By worker for which too much is queued, its calls. Most of the time there is none."""
        # Guarded by the lock.
        self._answered: defaultdict[int, int] = defaultdict(int)
        """By worker, bytes of answers since its queue was looked at."""
        self._queued: dict[int, int] = {}
        """By worker, bytes in its queue when that was looked at."""

    def add(self, worker: WorkerInfo, resume: Callable[[], None], *, is_call: bool = True) -> bool:
        """Postpones a call if too much is queued for its worker; returns whether that is so.

        Args:
            worker: the caller.
            resume: called on the event loop when the call may begin to run. Must not block.
            is_call: False for a stream, which has begun and waits between two items. Their number has a bound of
                its own.

        Raises:
            LimitReachedError: more calls of the worker are postponed than it may have in flight, by the options
                here.
        """
        if not self.waiting:
            return False
        with self._lock:
            if (calls := self.waiting.get(worker.wire_id)) is None:
                return False
            if is_call and len(calls) >= self._max_calls:
                raise LimitReachedError(
                    f"worker {worker.name!r} does not read its answers, for which {len(calls)} of its calls wait",
                    f"postponed calls={self._max_calls}",
                )
            calls.append(resume)
            return True

    def on_answer(self, worker: WorkerInfo, nbytes: int) -> None:
        """Counts an answer that has been sent, or queued.

        Args:
            worker: the caller.
            nbytes: of the answer, at least MIN_ANSWER_BYTES.
        """
        with self._lock:
            self._answered[worker.wire_id] += nbytes
            if self._answered[worker.wire_id] < self._look_bytes:
                return
            self._answered[worker.wire_id] = 0
            if worker.wire_id in self.waiting or not self._exceeds(worker.wire_id, 1):
                return
            self.waiting[worker.wire_id] = []
            is_first = len(self.waiting) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._network.call_soon(self._check_later)

    def figures(self, worker: WorkerInfo) -> Mapping[str, int]:
        """Returns the number of calls of a worker that are postponed."""
        with self._lock:
            return {"postponed_requests": len(self.waiting.get(worker.wire_id, ()))}

    def _exceeds(self, worker: int, part: int) -> bool:
        """Returns whether more is queued for a worker than a part of a bound. Called with the lock.

        Args:
            worker: its id.
            part: 1 for the whole bound, 2 for half of it.
        """
        mine = self._queued[worker] = self._network.queued_bytes(worker)
        if part * mine > self._max_bytes:
            return True
        if not mine or part * sum(self._queued.values()) <= self._max_total_bytes:
            return False
        for other in self._queued:  # which may be empty by now
            self._queued[other] = self._network.queued_bytes(other)
        return part * sum(self._queued.values()) > self._max_total_bytes

    def _check_later(self) -> None:
        """Called on the event loop."""
        asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        """Resumes the calls of workers that have read enough. Called on the event loop."""
        with self._lock:
            ready = [worker for worker in self.waiting if not self._exceeds(worker, 2)]
            resumed = [resume for worker in ready for resume in self.waiting.pop(worker)]
            if self.waiting:
                self._check_later()
        for resume in resumed:
            resume()
