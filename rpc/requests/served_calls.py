"""The requests of other workers that have not begun to run, and those that are to be answered later.

served_call.py has the states of a request. Those that wait for a promise of another worker are parked: they hold
no thread, and end with their timeout, by a clock that starts with the first of them. Each caller may have a number
of them, and so many bytes. Those whose functions have returned futures are given up when nobody waits for their
answers: a future may never be completed, and a graceful shutdown would wait for it for ever.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import final

from ...errors import LimitReachedError
from ..contracts.extension import Awaited
from ..contracts.messages import Deferred, Incoming
from ..contracts.options import FlowControlOptions
from ..execution.deadlines import Deadlines, DeadlinesFactory
from ..peers.flow_control import CALL_BYTES
from ..peers.peer import Peer
from .served_call import CallKey, ServedCall, ServedState

__all__ = ["MIN_WAIT_S", "NotBegun", "Resume", "ServedCalls", "may_begin"]

MIN_WAIT_S = 1e-3
"""Seconds of the shortest wait."""

ROUNDED_TO = 64
"""Waits are rounded up by less than two of these parts: the clock keeps a queue for each length of a wait, and who
calls may choose any."""

Resume = Callable[[ServedCall], None]
"""Has a request served. Must not block."""


class NotBegun(Enum):
    """Why a request is not to run."""

    CANCELLED = auto()
    """Its caller has cancelled it."""
    EXPIRED = auto()
    """The time is up that its caller waits."""
    ABANDONED = auto()
    """Its caller is lost."""


def may_begin(source: Peer) -> bool:
    """Returns whether requests of a worker may begin. One that has left has sent its last ones on purpose."""
    return source.end is None or source.end.orderly


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """One wait of a request. The next one may begin, on another thread, while this one is being registered.

    call: the request.
    awaited: what it waits for.
    resume: has it served again.
    wake: ends the wait.
    number: what the clock calls it.
    """

    call: ServedCall
    awaited: Sequence[Awaited]
    resume: Resume
    wake: Callable[[], None]
    number: int


@final
class ServedCalls:
    """Decides what becomes of each request: it begins, or it does not; it is answered, or it is given up.

    Takes no lock for requests that are not parked: each step is one operation on a dict.
    """

    def __init__(self, options: FlowControlOptions, make_deadlines: DeadlinesFactory, name: str) -> None:
        """Starts no clock yet.

        Args:
            options: the bounds.
            make_deadlines: makes the clock of parked requests.
            name: of this worker, for the clock's thread.
        """
        self.waiting: dict[CallKey, ServedCall] = {}
        """The requests that have arrived, and not begun to run. `Server.arrive` adds them."""
        self.deferred: dict[CallKey, ServedCall] = {}
        """Those whose answers are not known yet, although no thread is busy with them."""
        self._parked: dict[CallKey, _Wait] = {}
        self._numbers: dict[int, CallKey] = {}
        """The parked requests that have timeouts."""
        self._next_number = itertools.count()
        # By its own calls and those that they make, a caller may have this many in flight.
        self._max_parked = max(options.max_in_flight, options.max_received)
        self._max_parked_bytes = options.max_received_bytes
        self._make_deadlines = make_deadlines
        self._name = name
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._clock: Deadlines[int] | None = None
        self._is_closed = False

    # Those that have not begun.

    def begin(self, call: ServedCall) -> NotBegun | None:
        """Has a request begin to run; returns why it does not if it does not."""
        is_waiting = self.waiting.pop(call.key, None) is not None
        if call.source.end is not None and not may_begin(call.source):
            return NotBegun.ABANDONED
        if not is_waiting:
            return NotBegun.CANCELLED
        if call.deadline and time.monotonic() >= call.deadline:
            return NotBegun.EXPIRED
        call.state = ServedState.RUNNING
        return None

    def is_due(self, call: ServedCall) -> bool:
        """Returns whether `begin` would have a request begin now."""
        return call.key in self.waiting and not call.is_expired

    def cancel(self, key: CallKey) -> bool:
        """Keeps a request from beginning; returns False if it has begun, or never arrived."""
        is_cancelled = self.waiting.pop(key, None) is not None
        if self._parked:
            self._wake(key)
        return is_cancelled

    def discard(self, key: CallKey) -> None:
        """Forgets a request that will not run."""
        self.waiting.pop(key, None)

    def cancel_all(self, source: Peer) -> None:
        """Keeps the requests of a worker that have arrived from beginning."""
        for key in list(self.waiting):
            if key[0] == source.id:
                self.cancel(key)

    # Those that are answered later.

    def defer(self, call: ServedCall, message: Incoming, answer: Deferred) -> bool:
        """Registers a request whose answer a future will have; `take_deferred` follows.

        Returns:
            False if nobody waits for the answer: what ended it came before it was there to be found.
        """
        call.message, call.on_aborted, call.state = message, answer.on_aborted, ServedState.DEFERRED
        self.deferred[call.key] = call
        return not call.is_cancelled and call.source.end is None

    def take_deferred(self, key: CallKey) -> ServedCall | None:
        """Takes such a request, to answer it or to give it up; None if that has been done."""
        call = self.deferred.pop(key, None)
        if call is not None:
            call.state = ServedState.DONE
        return call

    def expired(self) -> list[CallKey]:
        """Returns the keys of those whose callers do not wait any longer."""
        return [key for key, call in self.deferred.copy().items() if call.is_expired]

    def seconds_left(self) -> float | None:
        """Returns the time until the next of them expires; None for never."""
        deadlines = [call.deadline for call in self.deferred.copy().values() if call.deadline]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def deferred_of(self, source: Peer) -> list[CallKey]:
        """Returns the keys of those of a worker."""
        return [key for key in self.deferred.copy() if key[0] == source.id]

    # Those that wait without a thread.

    def park(self, call: ServedCall, awaited: Sequence[Awaited], resume: Resume) -> None:
        """Has a request wait. It is resumed once: when something that it waits for is over, or it is not to run.

        Args:
            call: the request, which `is_due`.
            awaited: what it waits for.
            resume: has it served again.

        Raises:
            LimitReachedError: too many requests of the caller are parked, or too many bytes.
        """
        key = call.key
        self._count(call.source, call.nbytes)
        call.awaited, call.state = awaited, ServedState.PARKED
        wait = _Wait(call, awaited, resume, partial(self._wake, key), next(self._next_number))
        self._parked[key] = wait
        for each in awaited:
            each.add_waiter(wait.wake)
        # It may have been cancelled, and what it waits for may be over, before it was there to be found.
        if key not in self.waiting or any(each.is_over for each in awaited):
            self._wake(key)
        elif call.deadline:
            self._expire_later(wait.number, key, call.deadline)
        if self._parked.get(key) is not wait:  # woken meanwhile
            self._remove(wait)

    def close(self) -> None:
        """Ends the clock: no parked request times out from now on."""
        with self._lock:
            self._is_closed = True
            clock = self._clock
        if clock is not None:
            clock.close()

    def _wake(self, key: CallKey) -> None:
        """Has a request resumed if it is parked. Called on any thread."""
        wait = self._parked.pop(key, None)
        if wait is None:
            return
        self._remove(wait)
        call = wait.call
        with self._lock:
            call.source.parked_requests -= 1
            call.source.parked_bytes -= max(call.nbytes, CALL_BYTES)
        call.state = ServedState.ARRIVED
        wait.resume(call)

    def _remove(self, wait: _Wait) -> None:
        self._numbers.pop(wait.number, None)
        for each in wait.awaited:
            each.remove_waiter(wait.wake)

    def _count(self, source: Peer, nbytes: int) -> None:
        nbytes = max(nbytes, CALL_BYTES)
        with self._lock:
            count, parked_bytes = source.parked_requests, source.parked_bytes
            if count >= self._max_parked or (count and parked_bytes + nbytes > self._max_parked_bytes):
                raise LimitReachedError(
                    f"{count} requests of worker {source.info.name!r}, of {parked_bytes} bytes, wait for values "
                    "that are not there",
                    f"waiting requests={self._max_parked}",
                )
            source.parked_requests += 1
            source.parked_bytes += nbytes

    def _expire_later(self, number: int, key: CallKey, deadline: float) -> None:
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
