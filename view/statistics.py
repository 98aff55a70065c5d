"""Counts and times calls, by function and worker, on the caller and on the callee."""

import concurrent.futures
import threading
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar, final

import numpy as np

from ..errors import Outcome
from ..net.peer_text import printable
from ..proto.v1 import agent_pb2
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.messages import CALL, Deferred, Handler, Incoming, MessageType, Request
from ..rpc.contracts.options import View
from ..rpc.contracts.worker import WorkerEnd, WorkerInfo
from ..rref.rref import method_of_call
from .names import FUNCTION_KINDS, METHOD_CALL, OPERATIONS, MethodNames
from .timeline import COUNTERS, Timeline

__all__ = ["BOUNDS_S", "OTHER", "CallStatistics", "Histogram", "view_of"]

MAX_BUCKETS = 160
"""Buckets of a histogram; the last one begins at 18 minutes."""

_BOUND_BITS = range(14, 36, 2)

BOUNDS_S = tuple(2**bits / 1e9 for bits in _BOUND_BITS)
"""The upper bounds, in seconds, of the buckets that are shown: 16 µs, 66 µs and so on, to 17 s."""

MAX_PENDING = 256
"""Durations that are kept before they are counted, all at once: that takes a tenth of the time."""

COUNT_TIMEOUT_S = 1.0
"""Seconds that a reader waits while another thread counts; a signal handler may be inside of that thread."""

OTHER = "other"
"""The function, and the worker, of calls beyond the bound."""

MAX_ARRIVALS = 1 << 16
"""Requests that wait for a thread and whose time of arrival is kept; that of further ones is not."""

MAX_ERROR_CHARACTERS = 200
"""Of the text of the last error of a function."""

SERIES_PER_NAME = 8
"""Pairs of function and worker that are counted by themselves, for each of `max_names`."""


@final
class Histogram:
    """Durations, of which each is counted in a bucket a quarter as wide as its octave.

    So a quantile is off by an eighth at most. Safe to use from several threads, and from signal handlers.
    """

    __slots__ = ("_count", "_counts", "_lock", "_pending", "_total_ns")

    def __init__(self) -> None:
        self._counts = np.zeros(MAX_BUCKETS, np.int64)
        self._count = 0
        self._total_ns = 0
        self._pending = array("q")
        """Durations that are not counted yet. Appending to it is one operation of the interpreter."""
        self._lock = threading.Lock()
        """Held while durations are counted."""

    def add(self, nanoseconds: int) -> None:
        """Counts a duration."""
        pending = self._pending
        pending.append(nanoseconds)
        if len(pending) >= MAX_PENDING:
            self._count_pending(0.0)

    def _count_pending(self, timeout: float = COUNT_TIMEOUT_S) -> None:
        """Counts the durations that wait for it; does nothing if another thread does so for longer."""
        if not self._pending or not self._lock.acquire(timeout=timeout):
            return
        try:
            pending = self._pending
            length = len(pending)
            durations = np.frombuffer(pending[:length], np.int64)
            del pending[:length]  # not what has been appended meanwhile
            shifts = np.maximum(np.frexp(durations.astype(np.float64))[1] - 3, 0)
            indices = np.minimum((shifts << 2) + (durations >> shifts), MAX_BUCKETS - 1)
            self._counts += np.bincount(indices, minlength=MAX_BUCKETS)
            self._count += length
            self._total_ns += int(durations.sum())
        finally:
            self._lock.release()

    def counted(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Returns how many durations there were, by bucket."""
        self._count_pending()
        return self._counts

    @property
    def total_ns(self) -> int:
        """The sum of all durations, in nanoseconds."""
        self._count_pending()
        return self._total_ns

    @property
    def count(self) -> int:
        """How many durations there were."""
        self._count_pending()
        return self._count

    def quantile(self, fraction: float) -> float | None:
        """Returns the duration in seconds that this fraction of all does not exceed; None if there is none."""
        totals = np.cumsum(self.counted())
        if not totals[-1]:
            return None
        rank = max(fraction * totals[-1], 1)
        return _middle_ns(int(np.searchsorted(totals, rank))) / 1e9

    def as_json(self) -> dict[str, float | list[int] | None]:
        """Returns the quantiles that are shown and the sum, in seconds, and how many were within each bound."""
        totals = np.cumsum(self.counted())
        return {
            "total_s": self.total_ns / 1e9,
            "p50_s": self.quantile(0.5),
            "p99_s": self.quantile(0.99),
            "within": [int(totals[4 * (bits - 1) - 1]) for bits in _BOUND_BITS],
        }


def _middle_ns(index: int) -> float:
    if index < 8:
        return index
    shift, quarter = (index >> 2) - 1, 4 + (index & 3)
    return (quarter + 0.5) * (1 << shift)


def view_of(agent: RpcAgent) -> View | None:
    """Returns the options of an agent's view, or those of the environment; None if there are none."""
    return agent.options.view if agent.options.view is not None else View.from_environment()


class _Series:
    """The calls of one function between two workers."""

    __slots__ = ("durations", "function", "last_error", "peer")

    def __init__(self, function: str, peer: str) -> None:
        self.function, self.peer = function, peer
        self.durations = Histogram()
        self.last_error: tuple[float, str] | None = None
        """The time, in seconds since 1970, and the text of the last error."""

    def as_json(self) -> dict[str, Any]:
        """Returns names, counts and the last error as JSON values; subclasses add what else they have."""
        error = self.last_error
        return {
            "function": self.function,
            "count": self.durations.count,
            "last_error": None if error is None else {"time": error[0], "text": error[1]},
            "duration": self.durations.as_json(),
        }


@final
class _Sent(_Series):
    """The calls of this worker of one function on one worker."""

    __slots__ = ("failures",)

    def __init__(self, function: str, peer: str) -> None:
        super().__init__(function, peer)
        self.failures: Counter[Outcome] = Counter()

    def as_json(self) -> dict[str, Any]:
        failures = {outcome.name.lower(): self.failures[outcome] for outcome in Outcome}
        return {**super().as_json(), "worker": self.peer, "failures": failures}


@final
class _Served(_Series):
    """The calls of one function that one worker has had run here."""

    __slots__ = ("failed", "queued")

    def __init__(self, function: str, peer: str) -> None:
        super().__init__(function, peer)
        self.failed = 0
        self.queued = Histogram()
        """How long each call has waited before it began."""

    def as_json(self) -> dict[str, Any]:
        found = super().as_json()
        running = max(self.queued.count - found["count"], 0)
        return {
            **found,
            "caller": self.peer,
            "running": running,
            "failed": self.failed,
            "queued": self.queued.as_json(),
        }


S = TypeVar("S", bound=_Series)

_Known = dict[tuple[Any, ...], S]
"""Series by what is found faster than their names: the function itself, the wire id of the worker, the kind."""


@final
class CallStatistics(Extension):
    """The counts and times of the calls of one agent. Safe to use from any thread."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        view = view_of(agent)
        self.is_on = view is not None and view.statistics
        limit = view.max_names if view is not None else 1
        self._max_names = limit
        self._max_series = limit * SERIES_PER_NAME
        self._methods = MethodNames()
        self._functions: set[str] = set()
        self._workers: set[str] = set()
        self._lock = threading.RLock()  # reentrant for a signal handler, or a finalizer, that makes a call
        # What every call changes are single operations on dicts, and needs no lock.
        self._sent: dict[tuple[str, str], _Sent] = {}
        """By the names of function and worker."""
        self._served: dict[tuple[str, str], _Served] = {}
        self._known_sent: _Known[_Sent] = {}
        self._in_flight: dict[int, tuple[_Sent, int]] = {}
        """The series and the beginning of each call of this worker that has no answer, by its id."""
        self._arrivals: dict[tuple[int, int], int] = {}
        """The times at which requests have arrived that do not run yet, by worker and id."""
        self.not_begun = 0
        """How many requests were cancelled, expired or refused before they began."""
        self._failed = 0
        self._timeline: Timeline | None = None
        if self.is_on:
            self._timeline = Timeline(self._counters, f"gradwire-{agent.info.name}-view-clock")

    # The caller.

    def on_request(self, identifier: int, worker: WorkerInfo, request: Request) -> None:
        """Counts a call that is about to be sent."""
        kind, value = request.kind, request.value
        function = (
            value[0] if type(value) is tuple and value and type(value[0]) is FunctionType else _key_of(kind, value)
        )
        known = function, worker.wire_id, kind
        sent = self._known_sent.get(known)
        if sent is None:
            sent = self._find(self._known_sent, known, self._sent, _Sent, kind, value, worker)
        self._in_flight[identifier] = sent, perf_counter_ns()

    def on_failure(self, identifier: int, error: BaseException, outcome: Outcome) -> None:
        """Counts a call that has failed."""
        if (found := self._in_flight.get(identifier)) is not None:
            last_error = _described(error)
            with self._lock:
                found[0].failures[outcome] += 1
                found[0].last_error = last_error
                self._failed += 1

    def on_complete(self, identifier: int) -> None:
        """Counts the end of a call."""
        found = self._in_flight.pop(identifier, None)
        if found is not None:
            found[0].durations.add(perf_counter_ns() - found[1])

    # The callee.

    def on_arrival(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Notes when a request has arrived."""
        if len(self._arrivals) < MAX_ARRIVALS:
            self._arrivals[source.wire_id, envelope.id] = perf_counter_ns()

    def on_decode_error(self, message: Incoming, error: Exception) -> None:  # noqa: ARG002
        """Counts a request that does not begin."""
        if self._arrivals.pop((message.source.wire_id, message.envelope.id), None) is not None:
            with self._lock:
                self.not_begun += 1

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:  # noqa: ARG002
        """Forgets the requests of a lost worker that have not begun."""
        for key in self._arrivals.copy():
            if key[0] == worker.wire_id:
                self._arrivals.pop(key, None)

    def observe(self, handler: Handler) -> Handler:
        """Returns a handler that counts and times what a handler runs."""
        return replace(handler, run=partial(self._run, handler.run, {})) if handler.user_values else handler

    def _run(self, run: Callable[[Incoming], Any], known_served: _Known[_Served], message: Incoming) -> Any:
        identifier = message.envelope.id
        if not identifier:  # an item of a stream, which is no call
            return run(message)
        began = perf_counter_ns()
        source = message.source.wire_id
        arrived = self._arrivals.pop((source, identifier), began)
        value = message.value
        is_plain = type(value) is tuple and value and type(value[0]) is FunctionType
        known = value[0] if is_plain else _key_of(message.envelope.type, value), source
        served = known_served.get(known)
        if served is None:
            kind = message.envelope.type
            served = self._find(known_served, known, self._served, _Served, kind, value, message.source)
        served.queued.add(began - arrived)
        try:
            result = run(message)
        except BaseException as error:
            self._end(served, began, error)
            raise
        if type(result) is Deferred:
            result.future.add_done_callback(partial(self._end_later, served, message, began))
        else:
            self._end(served, began, message.failure)
        return result

    def _end_later(
        self, served: _Served, message: Incoming, began: int, future: "concurrent.futures.Future[Any]"
    ) -> None:
        error = concurrent.futures.CancelledError() if future.cancelled() else future.exception()
        self._end(served, began, error or message.failure)

    def _end(self, served: _Served, began: int, error: BaseException | None) -> None:
        if error is not None:
            last_error = _described(error)
            with self._lock:
                served.failed += 1
                served.last_error = last_error
        served.durations.add(perf_counter_ns() - began)

    # Both.

    def _find(
        self,
        known_table: _Known[S],
        known: tuple[Any, ...],
        table: dict[tuple[str, str], S],
        make: Callable[[str, str], S],
        kind: MessageType.ValueType,
        value: Any,
        worker: WorkerInfo,
    ) -> S:
        """Returns the series of a call that the function alone does not tell, or that of all beyond the bound."""
        if kind in FUNCTION_KINDS and (method := method_of_call(value)) is not None:
            known = (known[0], method), *known[1:]  # one function calls the methods of all references
            if (found := known_table.get(known)) is not None:
                return found
        name, operation = self._methods.of(kind, value)
        name = f"RRef.{name}" if operation == METHOD_CALL else name
        if kind in FUNCTION_KINDS and kind != CALL:
            name = f"{OPERATIONS[kind]} {name}"
        with self._lock:
            names = self._bounded(self._functions, name), self._bounded(self._workers, printable(worker.name))
            if names not in table and len(table) >= self._max_series:
                names = OTHER, OTHER
            if names not in table:
                table[names] = make(*names)
            series = table[names]
        if known[0] is not None:  # else it is told apart by names only
            if len(known_table) >= self._max_series:
                known_table.clear()
            known_table[known] = series
        return series

    def _bounded(self, names: set[str], name: str) -> str:
        if name not in names and len(names) >= self._max_names:
            return OTHER
        names.add(name)
        return name

    def sent(self) -> list[dict[str, Any]]:
        """Returns the calls of this worker by function and worker, as JSON values."""
        with self._lock:
            now = perf_counter_ns()
            ages = defaultdict[int, list[float]](list)
            for series, began in list(self._in_flight.values()):
                ages[id(series)].append((now - began) / 1e9)
            return [
                {**each.as_json(), "in_flight": len(ages[id(each)]), "oldest_s": max(ages[id(each)], default=None)}
                for _, each in sorted(self._sent.items())
            ]

    def served(self) -> list[dict[str, Any]]:
        """Returns the calls that have run, or run, on this worker by function and caller, as JSON values."""
        with self._lock:
            return [self._served[names].as_json() for names in sorted(self._served)]

    def timeline(self) -> dict[str, list[float]]:
        """Returns what was counted in each second of the last minute, if it is on: see `Timeline.as_json`."""
        if self._timeline is None:
            return {name: [] for name in ("ended", "seconds", *COUNTERS)}
        return self._timeline.as_json()

    def close(self) -> None:
        """Ends the thread of the timeline."""
        if self._timeline is not None:
            self._timeline.close()

    def _counters(self) -> tuple[int, ...]:
        traffic = self.agent.traffic()
        with self._lock:
            sent, served = (
                sum(each.durations.count for each in table.values()) for table in (self._sent, self._served)
            )
        return sent, self._failed, served, traffic["bytes_sent"], traffic["bytes_received"]

    @property
    def waiting(self) -> int:
        """How many requests have arrived and do not run yet."""
        return len(self._arrivals)


def _key_of(kind: MessageType.ValueType, value: Any) -> Any:
    """Returns what tells a call from others, fast; None if only names do, which takes longer."""
    if kind not in FUNCTION_KINDS:
        return kind
    function = value[0]
    owner = getattr(function, "__self__", None) if type(function) is BuiltinFunctionType else None
    return function if isinstance(owner, ModuleType | type) else None  # others may have an `__eq__` of their own


def _described(error: BaseException) -> tuple[float, str]:
    """Returns the time, and the class and the first line of an error. Its text is the program's, and may fail."""
    try:
        text = str(error).partition("\n")[0]
    except Exception:
        text = "its text cannot be read"
    return time.time(), printable(f"{type(error).__name__}: {text}", MAX_ERROR_CHARACTERS)
