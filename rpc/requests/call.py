"""One request to another worker, from its making to its end.

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
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, final

from ...errors import Outcome, RpcTimeoutError, set_outcome
from ...proto.v1 import agent_pb2
from ..contracts.messages import Handler, Outgoing
from ..execution.executor import Executor
from ..execution.futures import Future
from ..peers.flow_control import FlowControl
from ..peers.peer import Peer
from ..peers.peers import Peers
from .call_counter import CallCounter
from .extensions import Extensions
from .repeats import Repeats

__all__ = ["MAX_KEPT_BYTES", "MAX_TIMEOUT_MS", "Call", "CallParts", "State"]

MAX_TIMEOUT_MS = (1 << 32) - 1
"""The longest timeout that a request tells its receiver; 50 days."""

MAX_KEPT_BYTES = 1024
"""Bytes of the body and tensors of a call that may stay in its envelope; larger ones are removed."""


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
        if self.handler.user_values and parts.extensions.has_on_complete:
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
