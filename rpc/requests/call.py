"""One request to another worker, from its making to its end; how it is sent again, and how many are in flight.

| state     | what it waits for                     | event: next state                                          |
|-----------|---------------------------------------|------------------------------------------------------------|
| NEW       | nothing: its thread is about to send  | capacity: SENT; none: QUEUED; suspect worker: POSTPONED    |
| QUEUED    | capacity (flow_control.py)            | capacity: as NEW                                           |
| POSTPONED | its worker, which does not answer     | worker back: SENT                                          |
| SENT      | its answer                            | answer: DONE                                               |
| PAUSED    | the next attempt, if it is idempotent | pause over: NEW, with another id                           |
| DONE      |                                       |                                                            |

In every state but the last it also ends by its timeout, its cancellation, the loss of its worker and the end of
the agent. Whoever takes it out of the calls in flight, or out of those that pause, ends it, which is one operation
on a dict: so it ends once. All ends go through `Call.succeed`, `Call.fail` and `Call.end`.

A garbage collection runs at any line of any thread, which may hold any lock of the agent. A call that takes the
same lock again would hang, and with it the thread. So what a finalizer (`__del__`) calls is sent by another one,
with the help of `FinalizerCalls`.
"""

import contextlib
import contextvars
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, final

from ...errors import (
    NotInitializedError,
    Outcome,
    RpcTimeoutError,
    SendFailedError,
    WorkerLostError,
    WorkerSuspectError,
    set_outcome,
)
from ...proto.v1 import agent_pb2
from ..contracts.messages import Handler, Outgoing, Request
from ..execution.ctrl_c import wait_interruptibly
from ..execution.executor import Executor
from ..execution.futures import Future, error_of
from ..execution.interruptions import may_have_lock, under_finalizer
from ..peers.flow_control import FlowControl
from ..peers.peer import Peer, Peers
from .codec import Extensions

__all__ = [
    "CONNECTION_ERRORS",
    "MAX_KEPT_BYTES",
    "MAX_TIMEOUT_MS",
    "Call",
    "CallCounter",
    "CallKey",
    "CallParts",
    "FinalizerCalls",
    "Repeats",
    "State",
]

MAX_TIMEOUT_MS = (1 << 32) - 1
"""The longest timeout that a request tells its receiver; 50 days."""

MAX_KEPT_BYTES = 1024
"""Bytes of the body and tensors of a call that may stay in its envelope; larger ones are removed."""

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
"""The pause before the second attempt, and the longest; each is twice as long as the one before."""

_MAX_ABSENCE_S = 60.0
"""Seconds for which a call without a timeout waits for a worker that is lost, or does not answer."""

_MIN_TIMEOUT_S = 0.001
"""Seconds that an attempt has at least."""

CONNECTION_ERRORS = (SendFailedError, WorkerLostError, WorkerSuspectError)

CallKey = tuple[int, int]
"""A request of another worker: that one's wire id, and the request's id, or a negative number if it has none."""

log = logging.getLogger(__name__)


class State(Enum):
    """What becomes of a call next: see above."""

    NEW = auto()
    QUEUED = auto()
    POSTPONED = auto()
    SENT = auto()
    PAUSED = auto()
    DONE = auto()


_UNSENT = frozenset({State.NEW, State.QUEUED, State.POSTPONED, State.PAUSED})


@final
class CallCounter:
    """Counts calls in flight, and all calls there have been."""

    def __init__(self) -> None:
        self.running: dict[CallKey, Any] = {}
        """The calls of others that a thread of this worker is busy with: the `ServedCall` of each."""
        self._lock = threading.Lock()
        self._none_in_flight = threading.Condition(self._lock)
        self.waiters = 0
        """Threads in `wait_for_none`. An end that finds none need not `notify`: who comes later sees it."""
        self._is_closed = False
        self.requests: set[int] = set()
        """The ids of the calls in flight that this worker has sent, and of those that pause."""
        self.last_request = 0
        """The id of one of the latest calls that was sent: it changes with each."""
        self.last_served: CallKey = (0, 0)
        """The key of one of the latest calls that began to run here."""
        self._deferred = 0
        """Those of others that are to be answered, with no thread busy with them."""

    @property
    def latest(self) -> tuple[int, CallKey]:
        """Changes with each call that is sent, or begins to run here."""
        return self.last_request, self.last_served

    @property
    def in_flight(self) -> int:
        """The number of calls in flight."""
        # In this order: what is served makes requests, and may be answered later, before it ends.
        return len(self.running) + self._deferred + len(self.requests)

    def begin_request(self, identifier: int) -> None:
        """Counts a call that is sent, or pauses, by its id."""
        self.requests.add(identifier)
        self.last_request = identifier

    def end_request(self, identifier: int) -> None:
        """Counts the end of a call that was sent. Does nothing if it has ended."""
        self.requests.discard(identifier)
        if self.waiters:
            self.notify()

    def begin_answer(self) -> None:
        """Counts a call that is yet to be answered, with no thread that serves it."""
        with self._lock:
            self._deferred += 1

    def end_answer(self) -> None:
        """Counts the end of such a call."""
        with self._lock:
            self._deferred -= 1
        if self.waiters:
            self.notify()

    def wait_for_none(self, seconds: float | None) -> bool:
        """Waits until no call is in flight, or none counts; returns False if that takes more than `seconds`."""
        with self._lock:
            self.waiters += 1
            try:
                return wait_interruptibly(
                    self._none_in_flight.wait_for, lambda: self._is_closed or not self.in_flight, seconds
                )
            finally:
                self.waiters -= 1

    def close(self) -> None:
        """Ends all waits for calls to end, as the agent ends."""
        with self._lock:
            self._is_closed = True
            self._none_in_flight.notify_all()

    def notify(self) -> None:
        """Wakes those who wait, if no call is in flight. Called after an end, if there are `waiters`."""
        with self._lock:
            if self.waiters and not self.in_flight:
                self._none_in_flight.notify_all()


@final
@dataclass(frozen=True, slots=True)
class CallParts:
    """What the calls of one agent share, those of this worker and those of others.

    peers: the workers that are called, and that call.
    extensions: have the handlers, and are told of the ends of calls.
    executor: has threads for what may block, and is told of those that wait.
    call_soon: calls a function on the event loop. Raises RuntimeError when that has ended.
    counter: counts users' calls in flight.
    flow_control: bounds them, and knows how deep the calls are that this thread makes.
    """

    peers: Peers
    extensions: Extensions
    executor: Executor
    call_soon: Callable[..., None]
    counter: CallCounter
    flow_control: FlowControl


@final
class Repeats:
    """What it takes to send a call again, and what has become of its attempts so far."""

    def __init__(self, request: Request, timeout: float) -> None:
        """No attempt has been made yet. The timeout is that of all together, 0 for none."""
        self.request = request
        self.timeout = timeout
        self.attempts = 0
        self.is_cancelled = False
        self.outcome = Outcome.NOT_SENT
        """What has become of the call in the attempts so far."""
        self.error: Exception | None = None
        """What the latest attempt has failed with."""
        self.pause = _FIRST_PAUSE_S
        """Seconds before the next attempt."""
        self.context = contextvars.copy_context()
        """Of the thread that has made the call: such as the trace that it is part of."""
        self._ends_at = time.monotonic() + timeout if timeout else math.inf
        self._is_absent = False

    def seconds_left(self) -> float:
        """Returns the timeout of an attempt that begins now, 0 for none."""
        return max(self._ends_at - time.monotonic(), _MIN_TIMEOUT_S) if self.timeout else 0.0

    def take_error(self, error: Exception, outcome: Outcome) -> bool:
        """Notes what an attempt fails with; returns whether there is to be another one."""
        if outcome is Outcome.RAN or self.is_cancelled or not isinstance(error, CONNECTION_ERRORS):
            return False
        self.outcome = self.outcome_with(outcome)
        if not self.timeout and (outcome is Outcome.UNKNOWN or not self._is_absent):
            self._ends_at = time.monotonic() + _MAX_ABSENCE_S  # it was there until now
        self._is_absent = True
        self.error = error
        return self.has_time()

    def has_time(self) -> bool:
        """Returns whether another attempt can begin in time."""
        return time.monotonic() + self.pause < self._ends_at

    def take_pause(self) -> float:
        """Returns the seconds until the next attempt; the pause after that is longer."""
        pause, self.pause = self.pause, min(2 * self.pause, _MAX_PAUSE_S)
        return pause

    def outcome_with(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the call if the latest attempt has this one."""
        return self.outcome if outcome is Outcome.NOT_SENT else outcome


@final
@dataclass(slots=True, eq=False)
class Call:
    """A request, and its future.

    parts: of its agent.
    handler: of its message type.
    timeout: seconds, 0 for none.
    depth: how many calls it is inside of.
    repeats: how it is sent again; None if it may run once only.
    """

    parts: CallParts
    peer: Peer
    handler: Handler
    timeout: float
    depth: int
    repeats: Repeats | None = None
    identifier: int = field(default=0, init=False)
    """Of the latest attempt."""
    state: State = field(default=State.NEW, init=False)
    message: Outgoing | None = field(default=None, init=False)
    """What is sent, or what is left of it: see `note_sent`."""
    future: Future[Any] = field(init=False)
    """Set with the first attempt."""
    abandon: Callable[[], None] | None = field(default=None, init=False)
    """Ends its wait for capacity, or for its worker."""
    waits_since: float = field(default=0.0, init=False)
    """The time of `time.monotonic` at which it began to wait for that; 0 if it did not."""
    is_expired: bool = field(default=False, init=False)
    """Whether its time is up; it is about to be taken back, and to fail."""
    is_withdrawn: bool = field(default=False, init=False)
    """Whether it was taken back before anything of it was sent."""

    # Before it is sent.

    def begin_wait(self, state: State, abandon: Callable[[], None]) -> None:
        """Notes that it waits before it is sent, and what ends the wait."""
        self.state = state
        self.abandon = abandon
        self.waits_since = self.waits_since or time.monotonic()

    def tell_timeout(self, envelope: agent_pb2.Envelope) -> None:
        """Has its envelope say how long it may take until it begins to run."""
        waited = time.monotonic() - self.waits_since if self.waits_since else 0.0
        envelope.timeout_ms = max(1, int(min(1000 * (self.timeout - waited), MAX_TIMEOUT_MS)))

    def note_sent(self, message: Outgoing) -> None:
        """Keeps what is needed to take back what was sent: not its value."""
        if message.nbytes > MAX_KEPT_BYTES:
            message.envelope.ClearField("body")
            message.envelope.ClearField("tensors")
        message.body, message.tensors, message.references = b"", [], []

    # Its end.

    def timeout_error(self) -> RpcTimeoutError:
        """Returns the error with which it fails when its time is up."""
        activity = self.handler.description
        if self.state is State.QUEUED:
            activity = f"not sent, because too much is in flight: {activity}"
        seconds = self.timeout if self.repeats is None else self.repeats.timeout
        return RpcTimeoutError(self.peer.info.name, seconds, activity)

    def outcome_without(self, unsent: Collection[bytes] = ()) -> Outcome:
        """Returns what has become of it if it gets no answer.

        `unsent` has the beginnings of the envelopes that were queued when its connection broke.
        """
        if self.state in _UNSENT or self.is_withdrawn:
            return Outcome.NOT_SENT
        if unsent and self.handler.cancellable and self.message is not None and self.message.beginning() in unsent:
            return Outcome.NOT_SENT
        return Outcome.UNKNOWN

    def succeed(self, value: object) -> None:
        """Completes it with the value of its answer. Called by whoever has taken it."""
        self.state, parts = State.DONE, self.parts
        if self.abandon is not None:  # its worker may have answered what it has not been sent
            self._end_wait()
        if self.repeats is not None:
            self.future.set_cancel(None)  # which refers to this
        if self.handler.user_values and parts.extensions.end_hooks:
            parts.extensions.on_complete(self.identifier)
        if self.depth:
            with parts.flow_control.nesting.at(self.depth):  # of the calls that callbacks make
                self.future.set_result(value)
        else:
            self.future.set_result(value)
        if self.handler.user_values:
            counter = parts.counter
            counter.requests.discard(self.identifier)
            if counter.waiters:
                counter.end_request(self.identifier)

    def fail(self, error: Exception, outcome: Outcome) -> bool:
        """Fails it with an error that no other call fails with. Called by whoever has taken it.

        Returns:
            False if only this attempt has failed: the call is to be sent again.
        """
        parts, is_over = self.parts, True
        if self.handler.user_values:
            parts.extensions.on_failure(self.identifier, error, outcome)
            if self.repeats is not None:
                is_over = not self.repeats.take_error(error, outcome)
                outcome = self.repeats.outcome_with(outcome)
            parts.extensions.on_complete(self.identifier)
        if is_over:
            self.end(error, outcome)
        else:
            self._end_wait()
        if self.handler.user_values:
            parts.counter.end_request(self.identifier)
        return is_over

    def end(self, error: Exception, outcome: Outcome) -> None:
        """Fails its future, when no attempt is in flight."""
        self.state = State.DONE
        self._end_wait()
        if self.repeats is not None:
            self.future.set_cancel(None)
        if self.handler.user_values:
            set_outcome(error, outcome)
        with self.parts.flow_control.nesting.at(self.depth):
            self.future.set_exception(error)

    def _end_wait(self) -> None:
        abandon, self.abandon = self.abandon, None
        if abandon is not None:
            abandon()


@final
class FinalizerCalls:
    """Knows whether the calling thread collects garbage, and sends calls on another one. Takes no lock."""

    def __init__(self, executor: Executor, call_soon: Callable[..., None]) -> None:
        """Looks at collections until `close`. `call_soon` has the event loop call something; it takes no lock."""
        self.collecting: set[int] = set()
        """The threads that collect garbage now. Mostly empty."""
        self._executor = executor
        self._call_soon = call_soon
        self._callback = self._on_collection
        gc.callbacks.append(self._callback)

    def _on_collection(self, phase: str, _info: dict[str, int]) -> None:
        """Is called by Python on the thread that collects."""
        if phase == "start":
            self.collecting.add(threading.get_ident())
        else:
            self.collecting.discard(threading.get_ident())

    def is_collecting_here(self) -> bool:
        """Returns whether the calling thread runs a finalizer in a garbage collection."""
        return threading.get_ident() in self.collecting

    def send(self, send: Callable[[], Future[Any]], worker: str, operation: str) -> Future[Any]:
        """Has another thread send a call to a worker, and returns a future of the answer.

        In the collection, a wait for it gets None at once if what the collection has interrupted may hold a lock.
        """
        answer = _FinalizerFuture(self._executor, worker, operation, self.is_collecting_here)
        try:
            self._call_soon(self._executor.submit, _send, send, answer)
        except RuntimeError:  # the event loop has ended
            raise NotInitializedError("the RPC agent of this finalizer has shut down") from None
        return answer

    def close(self) -> None:
        """Looks at collections no longer."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._callback)


class _FinalizerFuture(Future[Any]):
    """The future of a call that a finalizer has made."""

    def __init__(
        self, executor: Executor, worker: str, operation: str, is_collecting_here: Callable[[], bool]
    ) -> None:
        super().__init__(executor, None, worker, operation)
        self._is_collecting_here = is_collecting_here

    def wait_for_answer(self, *, reads: bool = True) -> Any:  # noqa: ARG002
        """Waits, unless a finalizer would wait for what it has interrupted."""
        if not self.done() and self._is_collecting_here():
            interrupted = under_finalizer()
            if interrupted is None or may_have_lock(interrupted):
                log.debug("a finalizer does not wait for %s on worker %s", self.operation, self.worker)
                return None
        return super().wait_for_answer(reads=False)  # another thread has sent it


def _send(send: Callable[[], Future[Any]], answer: Future[Any]) -> None:
    """Sends a call, whose answer completes another future."""
    try:
        sent = send()
    except Exception as error:
        answer.set_exception(error)
    else:
        sent.add_done_callback(lambda _: _complete(answer, sent))


def _complete(answer: Future[Any], sent: Future[Any]) -> None:
    if (error := error_of(sent)) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(sent.value())
