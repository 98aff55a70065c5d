"""The requests of other workers, from their arrival to their answers.

| state     | what it waits for               | event: next state                                      |
|-----------|---------------------------------|--------------------------------------------------------|
| arrived   | its payloads, then a thread     | a thread: running; values are missing: parked; its     |
|           |                                 | caller does not read its answers: postponed            |
| parked    | values that others have promised | one is there, or will not come: arrived               |
| postponed | its caller                      | it has read enough: arrived                            |
| running   | its handler                     | a value or an error: done; a future: deferred          |
| deferred  | that future                     | it is done, or nobody waits for the answer: done       |

Its cancellation, its deadline, and the loss or the silence of its caller end it in the first three states and when
it is deferred; those that come while it runs end it then. Until it runs it is in `ServedCalls.waiting`, and in
`ServedCalls.deferred` when it is deferred: whoever takes it out there decides what becomes of it, which is one
operation on a dict. Requests that carry no values of users, and messages without an id, are in neither: they run
when a thread comes to them.

Those that wait for a promise of another worker are parked: they hold no thread, and end with their timeout, by a
clock that starts with the first of them. Each caller may have a number of them, and so many bytes. Those whose
functions have returned futures are given up when nobody waits for their answers: a future may never be completed,
and a graceful shutdown would wait for it for ever.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from ...errors import LimitReachedError, RpcCancelledError, RpcError, RpcTimeoutError, WorkerLostError
from ...proto.v1 import agent_pb2
from ..channels.payloads import PayloadReader
from ..contracts.extension import Awaited
from ..contracts.messages import Deferred, Handler, Incoming
from ..contracts.options import FlowControlOptions
from ..execution.deadlines import Deadlines, DeadlinesFactory
from ..peers.flow_control import CALL_BYTES
from ..peers.peer import Peer

__all__ = ["MIN_WAIT_S", "CallKey", "ServedCall", "ServedCalls", "may_begin"]

MIN_WAIT_S = 1e-3
"""Seconds of the shortest wait."""

ROUNDED_TO = 64
"""Waits are rounded up by less than two of these parts: the clock keeps a queue for each length of a wait, and who
calls may choose any."""

CallKey = tuple[int, int]
"""The caller's wire id, and the request's id; that of a message without one is a negative number of its own."""


@final
class ServedCall:
    """A request, and what is needed to run and to answer it."""

    def __init__(self, source: Peer, envelope: agent_pb2.Envelope, handler: Handler | None) -> None:
        """Has arrived from `source`; its payloads may still be on their way. An unknown type has no handler."""
        self.source = source
        self.envelope = envelope
        self.handler = handler
        self.key: CallKey = (source.id, envelope.id or -id(self))
        timeout = envelope.timeout_ms
        self.deadline = time.monotonic() + timeout / 1000 if timeout else 0.0
        """The time of `time.monotonic` until which its caller waits; 0 for ever."""
        self.is_cancelled = False
        """Whether its caller has cancelled it while it ran."""
        self.payloads: PayloadReader | None = None
        """Reads its payloads, when all have come."""
        self.nbytes = 0
        """Of envelope and payloads."""
        self.awaited: Sequence[Awaited] = ()
        """What it waits for, or has waited for: kept alive until it runs."""
        self.wake: Callable[[], None]
        """Ends its wait for that. A new one for each wait."""
        self.message: Incoming | None = None
        """Itself, decoded, when it is deferred."""
        self.on_aborted: Callable[[], None] | None = None
        """What is to be called when nobody waits for its deferred answer any more."""

    @property
    def is_expired(self) -> bool:
        """Whether its caller waits no longer."""
        return bool(self.deadline) and time.monotonic() >= self.deadline


def may_begin(source: Peer) -> bool:
    """Returns whether requests of a worker may begin. One that has left has sent its last ones on purpose."""
    return source.end is None or source.end.orderly


@final
class ServedCalls:
    """Decides what becomes of each request: it begins, or it does not; it is answered, or it is given up.

    Takes no lock for requests that are not parked: each step is one operation on a dict.
    """

    def __init__(self, options: FlowControlOptions, make_deadlines: DeadlinesFactory, name: str) -> None:
        """Starts no clock yet. The name is that of this worker."""
        self.waiting: dict[CallKey, ServedCall] = {}
        """The requests that have arrived, and not begun to run. `Server.arrive` adds them."""
        self.deferred: dict[CallKey, ServedCall] = {}
        """Those whose answers are not known yet, although no thread is busy with them."""
        self._parked: dict[CallKey, ServedCall] = {}
        # By its own calls and those that they make, a caller may have this many in flight.
        self._max_parked = max(options.max_in_flight, options.max_received)
        self._max_parked_bytes = options.max_received_bytes
        self._make_deadlines = make_deadlines
        self._name = name
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._clock: Deadlines[CallKey] | None = None
        self._is_closed = False

    # Those that have not begun.

    def begin(self, call: ServedCall, handler: Handler) -> RpcError | None:
        """Has a request begin to run; if it does not, returns the error that its caller gets."""
        source, is_waiting = call.source, self.waiting.pop(call.key, None) is not None
        if source.end is not None and not may_begin(source):
            reason = f"this was noticed before a request of it began on {self._name!r}"
            return WorkerLostError(source.info.name, reason)
        if not is_waiting:
            return RpcCancelledError(self._name)
        if call.deadline and time.monotonic() >= call.deadline:
            activity = f"its time was up before it began: {handler.description}"
            return RpcTimeoutError(self._name, call.envelope.timeout_ms / 1000, activity)
        return None

    def is_due(self, call: ServedCall) -> bool:
        """Returns whether `begin` would have a request begin now."""
        return call.key in self.waiting and not call.is_expired

    def cancel(self, key: CallKey) -> bool:
        """Keeps a request from beginning, if it has arrived and has not begun; returns whether it does."""
        is_cancelled = self.waiting.pop(key, None) is not None
        if self._parked:
            self._end_wait(key)
        return is_cancelled

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
        call.message, call.on_aborted = message, answer.on_aborted
        self.deferred[call.key] = call
        return not call.is_cancelled and call.source.end is None

    def take_deferred(self, key: CallKey) -> ServedCall | None:
        """Takes such a request, to answer it or to give it up; None if that has been done."""
        return self.deferred.pop(key, None)

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

    def park(self, call: ServedCall, awaited: Sequence[Awaited], resume: Callable[[ServedCall], None]) -> None:
        """Has a request, which `is_due`, wait.

        Args:
            call: the request.
            awaited: what it waits for.
            resume: has it served again, once: when something of that is over, or it is not to run. Does not block.

        Raises:
            LimitReachedError: too many requests of the caller are parked, or too many bytes.
        """
        key = call.key
        self._count(call.source, call.nbytes)
        wake = partial(self._wake, key, resume)
        call.awaited, call.wake = awaited, wake
        self._parked[key] = call
        for each in awaited:
            each.add_waiter(wake)
        # It may have been cancelled, and what it waits for may be over, before it was there to be found.
        if key not in self.waiting or any(each.is_over for each in awaited):
            wake()
        elif call.deadline:
            self._expire_later(key, call.deadline)
        # Woken meanwhile: its next wait may have begun, on another thread.
        if self._parked.get(key) is not call or call.wake is not wake:
            for each in awaited:
                each.remove_waiter(wake)

    def close(self) -> None:
        """Ends the clock: no parked request times out from now on."""
        with self._lock:
            self._is_closed = True
            clock = self._clock
        if clock is not None:
            clock.close()

    def _end_wait(self, key: CallKey) -> None:
        if (call := self._parked.get(key)) is not None:
            call.wake()

    def _wake(self, key: CallKey, resume: Callable[[ServedCall], None]) -> None:
        """Has a request resumed if it is parked. Called on any thread."""
        call = self._parked.pop(key, None)
        if call is None:
            return
        for each in call.awaited:
            each.remove_waiter(call.wake)
        with self._lock:
            call.source.parked_requests -= 1
            call.source.parked_bytes -= max(call.nbytes, CALL_BYTES)
        resume(call)

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

    def _expire_later(self, key: CallKey, deadline: float) -> None:
        with self._lock:
            if self._is_closed:
                return
            if self._clock is None:
                self._clock = self._make_deadlines(
                    self._end_wait, self._parked.__contains__, self._parked.__len__, f"gradwire-waits-{self._name}"
                )
            clock = self._clock
        # A request that has waited before expires at the same time, so an entry of that wait does no harm.
        clock.add(key, _rounded_up(max(MIN_WAIT_S, deadline - time.monotonic())))


def _rounded_up(seconds: float) -> float:
    """Returns one of a thousand lengths of time, in seconds."""
    part, exponent = math.frexp(seconds)
    return math.ldexp(math.ceil(part * ROUNDED_TO) / ROUNDED_TO, exponent)
