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
from collections.abc import Callable, Mapping
from typing import final

from ...errors import LimitReachedError
from ..contracts.options import FlowControlOptions
from ..contracts.worker import WorkerInfo

__all__ = ["MIN_ANSWER_BYTES", "Backlog", "Backlogs"]

MIN_ANSWER_BYTES = 1 << 10
"""Bytes of the smallest answer that is counted. The number of the others is bounded by the calls in flight."""

MAX_LOOK_BYTES = 4 << 20
"""Bytes of answers to a worker after which its queue is looked at, at most; a sixteenth of a small bound."""

MAX_CALLS_FACTOR = 2
"""Calls of one worker that are postponed, at most: `max_in_flight`, which nesting may exceed, times this."""

CHECK_INTERVAL_S = 0.02
"""Seconds between two looks at the queues of workers whose calls wait."""


@final
class Backlog:
    """What one worker has not read of the answers to it, and its calls that wait for that."""

    def __init__(self, worker: WorkerInfo, queued_bytes: Callable[[], int]) -> None:
        self.worker = worker
        self.queued_bytes = queued_bytes
        # Guarded by the lock of Backlogs.
        self.answered = 0
        """Bytes of answers since its queue was looked at."""
        self.seen = 0
        """Bytes in its queue when that was looked at."""
        self.postponed: list[Callable[[], None]] | None = None
        """Its calls, if too much is queued for it."""


@final
class Backlogs:
    """The backlogs of all workers of one agent. Safe to use from any thread."""

    def __init__(self, options: FlowControlOptions, call_soon: Callable[[Callable[[], None]], None]) -> None:
        """Postpones nothing yet; `call_soon` raises RuntimeError when the event loop has ended."""
        self._max_calls = MAX_CALLS_FACTOR * max(options.max_in_flight, options.max_received)
        self._max_bytes = options.max_unsent_bytes
        self._max_total_bytes = options.max_total_unsent_bytes
        self._look_bytes = min(MAX_LOOK_BYTES, self._max_bytes // 16)
        self._call_soon = call_soon
        self._lock = threading.Lock()
        self.full: list[Backlog] = []
        """Those of workers for which too much is queued. Most of the time there is none."""
        self._known: list[Backlog] = []
        """Those that were looked at. Guarded by the lock."""

    def add(self, backlog: Backlog, resume: Callable[[], None], *, is_call: bool = True) -> bool:
        """Postpones a call if too much is queued for its worker; returns whether that is so.

        Args:
            backlog: of the caller.
            resume: called on the event loop when the call may begin to run. Must not block.
            is_call: False for a stream, which waits between two items; another bound holds for their number.

        Raises:
            LimitReachedError: more calls of the worker wait than it may have in flight, by the options here.
        """
        if not self.full:
            return False
        with self._lock:
            if (calls := backlog.postponed) is None:
                return False
            if is_call and len(calls) >= self._max_calls:
                name = backlog.worker.name
                raise LimitReachedError(
                    f"worker {name!r} does not read its answers, for which {len(calls)} of its calls wait",
                    f"postponed calls={self._max_calls}",
                )
            calls.append(resume)
            return True

    def on_answer(self, backlog: Backlog, nbytes: int) -> None:
        """Counts an answer to a caller that has been sent, or queued, of MIN_ANSWER_BYTES at least."""
        with self._lock:
            backlog.answered += nbytes
            if backlog.answered < self._look_bytes:
                return
            backlog.answered = 0
            if backlog not in self._known:
                self._known.append(backlog)
            if backlog.postponed is not None or not self._exceeds(backlog, 1):
                return
            backlog.postponed = []
            self.full.append(backlog)
            is_first = len(self.full) == 1
        if is_first:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._call_soon(self._check_later)

    def figures(self, backlog: Backlog) -> Mapping[str, int]:
        """Returns the number of calls of a worker that are postponed."""
        with self._lock:
            return {"postponed_requests": len(backlog.postponed or ())}

    def _exceeds(self, backlog: Backlog, part: int) -> bool:
        """Returns whether more is queued for a worker than a bound, or half of it if `part` is 2.

        Called with the lock.
        """
        backlog.seen = backlog.queued_bytes()
        if part * backlog.seen > self._max_bytes:
            return True
        if not backlog.seen or part * sum(each.seen for each in self._known) <= self._max_total_bytes:
            return False
        for each in self._known:  # which may be empty by now
            each.seen = each.queued_bytes()
        self._known = [each for each in self._known if each.seen]
        return part * sum(each.seen for each in self._known) > self._max_total_bytes

    def _check_later(self) -> None:
        """Called on the event loop."""
        asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        """Resumes the calls of workers that have read enough. Called on the event loop."""
        resumed: list[Callable[[], None]] = []
        with self._lock:
            for backlog in [each for each in self.full if not self._exceeds(each, 2)]:
                self.full.remove(backlog)
                resumed += backlog.postponed or ()
                backlog.postponed = None
            if self.full:
                self._check_later()
        for resume in resumed:
            resume()
