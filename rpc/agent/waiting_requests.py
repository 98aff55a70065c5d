"""Requests that have arrived and do not run yet, and will not if their callers wait for them no longer.

They wait for a thread, or for what another worker has promised: see `Extension.wait_before_run`. Those that wait
for a promise are parked: they hold no thread, and end with their timeout, by a clock that starts with the first of
them. Each caller may have a number of them, and so many bytes.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import final

from ...errors import LimitReachedError
from ...proto.v1 import agent_pb2
from ..contracts.extension import Awaited
from ..contracts.options import FlowControlOptions
from ..contracts.worker import WorkerInfo
from ..execution.deadlines import Deadlines
from .factories import DeadlinesFactory
from .flow_control import CALL_BYTES

__all__ = ["MIN_WAIT_S", "NotBegun", "Resume", "WaitingRequests"]

MIN_WAIT_S = 1e-3
"""Seconds of the shortest wait."""

ROUNDED_TO = 64
"""Waits are rounded up by less than two of these parts: the clock keeps a queue for each length of a wait, and who
calls may choose any."""

_Key = tuple[int, int]
"""The caller's wire id, and the request's id."""

Resume = Callable[[Sequence[Awaited]], None]
"""Has a request served. Takes what it has waited for, which has to live until then. Must not block."""


class NotBegun(Enum):
    """Why a request is not to run."""

    CANCELLED = auto()
    """Its caller has cancelled it."""
    EXPIRED = auto()
    """The time is up that its caller waits."""
    ABANDONED = auto()
    """Its caller is lost."""


@dataclass(slots=True)
class _Parked:
    """A request that waits without a thread."""

    awaited: Sequence[Awaited]
    nbytes: int
    resume: Resume
    wake: Callable[[], None]
    number: int
    """What the clock calls it: a request may be parked several times."""


@dataclass(slots=True)
class _Count:
    """The parked requests of one worker."""

    requests: int = 0
    nbytes: int = 0


@final
class WaitingRequests:
    """Decides between the begin of a request and its end before that: only one of them happens.

    Takes no lock for requests that are not parked: each step is one operation on a dict.
    """

    def __init__(self, options: FlowControlOptions, make_deadlines: DeadlinesFactory, name: str) -> None:
        """Starts no clock yet.

        Args:
            options: the bounds.
            make_deadlines: makes the clock of parked requests.
            name: of this worker, for the clock's thread.
        """
        self._deadlines: dict[_Key, float] = {}
        """The time of `time.monotonic` at which each request expires; 0 for never."""
        self._lost: set[int] = set()
        """The workers whose requests do not begin any more."""
        self._parked: dict[_Key, _Parked] = {}
        self._numbers: dict[int, _Key] = {}
        """The parked requests that have timeouts."""
        self._next_number = itertools.count()
        # By its own calls and those that they make, a caller may have this many in flight.
        self._max_parked = max(options.max_in_flight, options.max_received)
        self._max_parked_bytes = options.max_received_bytes
        self._make_deadlines = make_deadlines
        self._name = name
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._counts: dict[int, _Count] = {}
        """Of the parked requests, by worker."""
        self._clock: Deadlines[int] | None = None
        self._is_closed = False

    def add(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Registers a request that has arrived; its payloads may still be on their way."""
        key = source.wire_id, envelope.id
        timeout = envelope.timeout_ms
        self._deadlines[key] = time.monotonic() + timeout / 1000 if timeout else 0.0
        if self._lost and source.wire_id in self._lost:  # which may have been told before it was registered
            self._deadlines.pop(key, None)

    def begin(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> float | NotBegun:
        """Has a request begin to run; returns its deadline, 0 for none, or why it does not begin."""
        deadline = self._deadlines.pop((source.wire_id, envelope.id), None)
        if deadline is None:
            return NotBegun.ABANDONED if source.wire_id in self._lost else NotBegun.CANCELLED
        if deadline and time.monotonic() >= deadline:
            return NotBegun.EXPIRED
        return deadline

    def may_begin(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """Returns whether `begin` would have a request begin now."""
        deadline = self._deadlines.get((source.wire_id, envelope.id))
        return deadline is not None and (not deadline or time.monotonic() < deadline)

    def cancel(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """Cancels the request with this envelope's id; returns False if it has begun, or never arrived."""
        return self._cancel((source.wire_id, envelope.id))

    def discard(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Forgets a request that will not run."""
        self._deadlines.pop((source.wire_id, envelope.id), None)

    def drop_worker(self, worker: WorkerInfo) -> None:
        """Keeps the requests of a worker that is lost from beginning."""
        self._lost.add(worker.wire_id)
        self.cancel_all(worker)

    def cancel_all(self, worker: WorkerInfo) -> None:
        """Keeps the requests of a worker that have arrived from beginning."""
        for key in list(self._deadlines):
            if key[0] == worker.wire_id:
                self._cancel(key)

    def __len__(self) -> int:
        return len(self._deadlines)

    # Those that wait without a thread.

    def park(
        self,
        source: WorkerInfo,
        envelope: agent_pb2.Envelope,
        awaited: Sequence[Awaited],
        nbytes: int,
        resume: Resume,
    ) -> None:
        """Has a request wait. It is resumed once: when something that it waits for is over, or it is not to run.

        Args:
            source: the caller.
            envelope: the request's, which `may_begin`.
            awaited: what it waits for.
            nbytes: of the request.
            resume: has it served again.

        Raises:
            LimitReachedError: too many requests of the caller are parked, or too many bytes.
        """
        key = source.wire_id, envelope.id
        self._count(source, nbytes)
        parked = _Parked(awaited, nbytes, resume, partial(self._wake, key), next(self._next_number))
        self._parked[key] = parked
        for each in awaited:
            each.add_waiter(parked.wake)
        deadline = self._deadlines.get(key)
        # It may have been cancelled, and what it waits for may be over, before it was there to be found.
        if deadline is None or any(each.is_over for each in awaited):
            self._wake(key)
        elif deadline:
            self._expire_later(parked.number, key, deadline)
        if self._parked.get(key) is not parked:  # woken meanwhile
            self._remove(parked)

    def figures(self, worker: WorkerInfo) -> Mapping[str, int]:
        """Returns the number of requests of a worker that are parked."""
        with self._lock:
            return {"parked_requests": self._counts.get(worker.wire_id, _Count()).requests}

    def close(self) -> None:
        """Ends the clock: no parked request times out from now on."""
        with self._lock:
            self._is_closed = True
            clock = self._clock
        if clock is not None:
            clock.close()

    def _cancel(self, key: _Key) -> bool:
        is_cancelled = self._deadlines.pop(key, None) is not None
        if self._parked:
            self._wake(key)
        return is_cancelled

    def _wake(self, key: _Key) -> None:
        """Has a request resumed if it is parked. Called on any thread."""
        parked = self._parked.pop(key, None)
        if parked is None:
            return
        self._remove(parked)
        with self._lock:
            count = self._counts[key[0]]
            count.requests -= 1
            count.nbytes -= max(parked.nbytes, CALL_BYTES)
            if not count.requests:
                del self._counts[key[0]]
        parked.resume(parked.awaited)

    def _remove(self, parked: _Parked) -> None:
        self._numbers.pop(parked.number, None)
        for each in parked.awaited:
            each.remove_waiter(parked.wake)

    def _count(self, source: WorkerInfo, nbytes: int) -> None:
        nbytes = max(nbytes, CALL_BYTES)
        with self._lock:
            count = self._counts.get(source.wire_id) or _Count()
            if count.requests >= self._max_parked or (
                count.requests and count.nbytes + nbytes > self._max_parked_bytes
            ):
                raise LimitReachedError(
                    f"{count.requests} requests of worker {source.name!r}, of {count.nbytes} bytes, wait for "
                    "values that are not there",
                    f"waiting requests={self._max_parked}",
                )
            self._counts[source.wire_id] = count
            count.requests += 1
            count.nbytes += nbytes

    def _expire_later(self, number: int, key: _Key, deadline: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._clock is None:
                self._clock = self._make_deadlines(
                    self._expire, self._numbers.__contains__, self._numbers.__len__, f"gradwire-waits-{self._name}"
                )
            clock = self._clock
        self._numbers[number] = key
        clock.add(number, _rounded_up(max(MIN_WAIT_S, deadline - time.monotonic())))

    def _expire(self, number: int) -> None:
        if (key := self._numbers.get(number)) is not None:
            self._wake(key)


def _rounded_up(seconds: float) -> float:
    """Returns one of a thousand lengths of time, in seconds."""
    part, exponent = math.frexp(seconds)
    return math.ldexp(math.ceil(part * ROUNDED_TO) / ROUNDED_TO, exponent)
