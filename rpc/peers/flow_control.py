"""Bounds the calls that this worker has in flight, and what it has sent that others do not read.

A call is in flight from when it is sent, or queued to be sent, until its answer arrives or its worker is lost. Its
timeout does not end that: a worker that is stopped would otherwise be sent more calls after each timeout.

Calls wait for capacity, and functions wait for the calls that they make. So that these waits never form a circle,
each call has a depth: 0 for a call of the program, and for those that a remote function makes, one more than that
of the call that it serves. A call is always admitted if none of its depth to the same worker is in flight. (The
structured buffer pool of store-and-forward networks does the same with the hops of a packet.) docs/architecture.md
has the argument.

Far from the bounds, calls are counted by single operations on a dict and a set, which need no lock; near them, and
for large and nested calls, under a lock.

Answers never wait, and as many of them may be queued for a worker as it has calls in flight, whatever their size.
So when too many bytes are queued for a worker, its calls that have not begun to run wait until half of those are
sent, and so do the generators of its streams, whatever window it has asked for. These calls do not keep anything
from being read: they wait for the other worker's reading and nothing else, and cannot close a circle of waits.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, final

from ...errors import LimitReachedError, SendQueueFullError
from ..contracts.options import FlowControlOptions
from ..contracts.worker import WorkerInfo

__all__ = [
    "CALL_BYTES",
    "MIN_ANSWER_BYTES",
    "Backlog",
    "Backlogs",
    "FlowControl",
    "Waiter",
    "Window",
    "has_event_loop",
]

CALL_BYTES = 1 << 10
"""Bytes that a call counts as at least: some of what this worker keeps of it besides its arguments."""

LOCK_FREE_MARGIN = 64
"""The distance to a bound in which calls are counted under the lock. So a bound is exceeded only if more threads
than this are interrupted between two steps at once."""

MIN_ANSWER_BYTES = 1 << 10
"""Bytes of the smallest answer that is counted. The number of the others is bounded by the calls in flight."""

MAX_LOOK_BYTES = 4 << 20
"""Bytes of answers to a worker after which its queue is looked at, at most; a sixteenth of a small bound."""

MAX_CALLS_FACTOR = 2
"""Calls of one worker that are postponed, at most: `max_in_flight`, which nesting may exceed, times this."""

CHECK_INTERVAL_S = 0.02
"""Seconds between two looks at the queues of workers whose calls wait."""

_TOTAL_OPTIONS = frozenset({"max_total_in_flight", "max_total_in_flight_bytes"})


class _Nesting(threading.local):
    """How many calls the calls of this thread are inside of, 0 outside of remote functions, and until when."""

    depth = 0
    deadline = 0.0
    """When the caller of the request that this thread serves waits no longer, by `time.monotonic`; 0 for never."""

    @contextlib.contextmanager
    def at(self, depth: int) -> Iterator[None]:
        """Context manager in which the calls of this thread have another depth."""
        before, self.depth = self.depth, depth
        try:
            yield
        finally:
            self.depth = before


class _Charge(NamedTuple):
    """What a call counts as."""

    depth: int
    extra_bytes: int
    """Its bytes beyond CALL_BYTES."""


_PLAIN = _Charge(0, 0)
"""The charge of nearly all calls; compared by identity."""


@final
class Waiter:
    """A call that waits for capacity."""

    def __init__(self, identifier: int, charge: _Charge) -> None:
        self.identifier = identifier
        self.charge = charge
        self.woken: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the call is admitted, or has failed."""

    def wake(self, *_: object) -> None:
        """Ends the wait. Does nothing when called again."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.woken.set_result(None)


@final
class Window:
    """The calls to one worker that are in flight, and those that wait. FlowControl counts them."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.calls: dict[int, _Charge] = {}
        """Those in flight, by id."""
        self.lock_free_limit = 0
        """The number of calls up to which no lock is needed. Set with the first call."""
        # Guarded by the lock of FlowControl.
        self.extra_bytes = 0
        self.nested: Counter[int] = Counter()
        """The number of calls in flight by depth, except those of depth 0."""
        self.waiting: dict[int, deque[Waiter]] = {}
        """By depth."""

    def count_at(self, depth: int) -> int:
        """Returns the number of calls in flight of this depth."""
        if depth:
            return self.nested[depth]
        # A nested call that is being released may still be in one of the two.
        return max(0, len(self.calls) - self.nested.total()) if self.nested else len(self.calls)


@final
class FlowControl:
    """Counts the calls of one agent that are in flight, and has more of them wait. Safe to use from any thread."""

    def __init__(self, options: FlowControlOptions) -> None:
        self.nesting = _Nesting()
        self._options = options
        self._max_calls, self._max_bytes = options.max_in_flight, options.max_in_flight_bytes
        self._max_total_calls = options.max_total_in_flight
        self._max_total_bytes = options.max_total_in_flight_bytes
        self._lock = threading.Lock()
        self._calls: set[int] = set()
        """The ids of all calls in flight."""
        self._lock_free_limit = 0
        # Guarded by the lock.
        self._is_closed = False
        self._extra_bytes = 0
        self._waiting: dict[Window, None] = {}
        """The windows in which calls wait; the one that has admitted last is the last."""
        self._is_total_full = False
        """Whether a call waits for the sum over all workers."""
        self._set_total_limit()

    def admit(self, window: Window, identifier: int, nbytes: int, *, blocks: bool = True) -> Waiter | None:
        """Counts a call with arguments of so many bytes as in flight, or has it wait for that.

        `blocks` tells whether the thread would block in the wait, which that of an event loop must not. Returns
        None if the call is admitted; else it is when `woken` of the waiter is done, unless it has failed.

        Raises:
            SendQueueFullError: the call may not wait.
        """
        if (
            nbytes <= CALL_BYTES
            and len(window.calls) < window.lock_free_limit
            and len(self._calls) < self._lock_free_limit
            and not self.nesting.depth
        ):
            window.calls[identifier] = _PLAIN
            self._calls.add(identifier)
            return None
        return self._admit_or_queue(window, identifier, nbytes, blocks=blocks)

    def release(self, window: Window, identifier: int) -> None:
        """Counts a call as answered, or not sent. Does nothing if no such call to the worker is in flight."""
        charge = window.calls.pop(identifier, None)
        if charge is None:
            return
        self._calls.discard(identifier)
        if charge is _PLAIN and not window.waiting and not self._is_total_full:
            return
        with self._lock:
            self._add_charge(window, charge, -1)
            if window.waiting or self._is_total_full:
                self._admit_waiters(window)

    def release_all(self, window: Window) -> None:
        """Forgets the calls to a worker that is lost: they will not be answered."""
        with self._lock:
            for identifier in list(window.calls):
                if (charge := window.calls.pop(identifier, None)) is not None:
                    self._calls.discard(identifier)
                    self._add_charge(window, charge, -1)
            self._admit_waiters(window)

    def abandon(self, window: Window, identifier: int) -> None:
        """Has a call wait no longer, or counts it as not sent."""
        if window.waiting:
            with self._lock:
                for queue in window.waiting.values():
                    for waiter in [each for each in queue if each.identifier == identifier]:
                        queue.remove(waiter)
                self._admit_waiters(window)  # those behind it may be smaller
        self.release(window, identifier)

    def close(self) -> None:
        """Admits all calls from now on, also those that wait: they fail, because the agent is closed."""
        with self._lock:
            self._is_closed = True
            for window in list(self._waiting):
                self._admit_from(window)

    def figures(self, window: Window) -> Mapping[str, int]:
        """Returns the numbers of calls to a worker that are in flight and that wait, and the bytes in flight."""
        with self._lock:
            return {
                "calls_in_flight": len(window.calls),
                "bytes_in_flight": len(window.calls) * CALL_BYTES + window.extra_bytes,
                "waiting_calls": sum(map(len, window.waiting.values())),
            }

    def _admit_or_queue(self, window: Window, identifier: int, nbytes: int, *, blocks: bool) -> Waiter | None:
        depth, extra_bytes = self.nesting.depth, max(0, nbytes - CALL_BYTES)
        charge = _Charge(depth, extra_bytes) if depth or extra_bytes else _PLAIN
        with self._lock:
            self._set_limit(window)
            exceeded = self._exceeded(window, charge)
            if exceeded is None and self._is_next(window, depth):
                self._count(window, identifier, charge)
                return None
            if self._options.when_full == "raise":
                raise self._full_error(window, exceeded, "wait for earlier calls, or set a larger bound")
            if blocks and has_event_loop():
                advice = "an event loop must not block: use `await aio.call(...)`, which waits"
                raise self._full_error(window, exceeded, advice)
            waiter = Waiter(identifier, charge)
            window.waiting.setdefault(depth, deque()).append(waiter)
            self._waiting[window] = None
            self._admit_waiters(window)  # a call may have been released without the lock since `_exceeded`
        return waiter

    def _full_error(self, window: Window, exceeded: str | None, advice: str) -> SendQueueFullError:
        option = exceeded or "max_in_flight"  # earlier calls wait
        return SendQueueFullError(window.worker.name, option, getattr(self._options, option), advice)

    # With the lock.

    def _exceeded(self, window: Window, charge: _Charge) -> str | None:
        """Returns the option that keeps a call from being sent now; None if there is none."""
        if self._is_closed or not window.count_at(charge.depth):
            return None
        calls, total, (_, extra_bytes) = len(window.calls) + 1, len(self._calls) + 1, charge
        if calls > self._max_calls:
            return "max_in_flight"
        if calls * CALL_BYTES + window.extra_bytes + extra_bytes > self._max_bytes:
            return "max_in_flight_bytes"
        if total > self._max_total_calls:
            return "max_total_in_flight"
        if total * CALL_BYTES + self._extra_bytes + extra_bytes > self._max_total_bytes:
            return "max_total_in_flight_bytes"
        return None

    def _is_next(self, window: Window, depth: int) -> bool:
        """Returns whether a new call need not wait behind others."""
        if not window.waiting and not self._is_total_full:
            return True
        if not window.count_at(depth):
            return depth not in window.waiting
        return not self._is_total_full and all(other < depth for other in window.waiting)

    def _count(self, window: Window, identifier: int, charge: _Charge) -> None:
        window.calls[identifier] = charge
        self._calls.add(identifier)
        self._add_charge(window, charge, 1)

    def _add_charge(self, window: Window, charge: _Charge, sign: int) -> None:
        depth, extra_bytes = charge
        if depth:
            window.nested[depth] += sign
            if not window.nested[depth]:
                del window.nested[depth]
        if extra_bytes:
            window.extra_bytes += sign * extra_bytes
            self._extra_bytes += sign * extra_bytes
            self._set_limit(window)
            self._set_total_limit()

    def _admit_waiters(self, released: Window) -> None:
        """Admits the calls that there is capacity for, after something was released in a window."""
        windows = list(self._waiting) if self._is_total_full else [released]
        wait_for_total = [self._admit_from(window) for window in windows]
        self._is_total_full = any(wait_for_total)
        self._set_total_limit()

    def _admit_from(self, window: Window) -> bool:
        """Admits calls that wait in a window, the deepest first: others wait for them.

        Returns whether a call waits for the sum over all workers.
        """
        is_blocked = is_total_full = False
        for depth in sorted(window.waiting, reverse=True):
            queue = window.waiting[depth]
            while queue:
                exceeded = self._exceeded(window, queue[0].charge)
                if exceeded in _TOTAL_OPTIONS:
                    # First: until it is set, calls are released without the lock.
                    self._is_total_full = True
                    exceeded = self._exceeded(window, queue[0].charge)
                    is_total_full |= exceeded in _TOTAL_OPTIONS
                if exceeded is not None or (is_blocked and window.count_at(depth)):
                    is_blocked = True
                    break
                waiter = queue.popleft()
                self._count(window, waiter.identifier, waiter.charge)
                self._waiting[window] = self._waiting.pop(window)
                waiter.wake()
            if not queue:
                del window.waiting[depth]
        if not window.waiting:
            self._waiting.pop(window, None)
        self._set_limit(window)
        return is_total_full

    def _set_limit(self, window: Window) -> None:
        limit = min(self._max_calls, (self._max_bytes - window.extra_bytes) // CALL_BYTES)
        window.lock_free_limit = 0 if window.waiting else limit - LOCK_FREE_MARGIN

    def _set_total_limit(self) -> None:
        limit = min(self._max_total_calls, (self._max_total_bytes - self._extra_bytes) // CALL_BYTES)
        self._lock_free_limit = 0 if self._is_total_full else limit - LOCK_FREE_MARGIN


def has_event_loop() -> bool:
    """Returns whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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
