"""A request of another worker, from its arrival to its answer.

| state     | what it waits for               | event: next state                                      |
|-----------|---------------------------------|--------------------------------------------------------|
| ARRIVED   | its payloads, then a thread     | a thread: RUNNING; values are missing: PARKED; its     |
|           |                                 | caller does not read its answers: POSTPONED            |
| PARKED    | values that others have promised | one is there, or will not come: ARRIVED               |
| POSTPONED | its caller                      | it has read enough: ARRIVED                            |
| RUNNING   | its handler                     | a value or an error: DONE; a future: DEFERRED          |
| DEFERRED  | that future                     | it is done, or nobody waits for the answer: DONE       |
| DONE      |                                 |                                                        |

Its cancellation, its deadline, and the loss or the silence of its caller end it in the first three states, and in
DEFERRED; those that come while it runs end it when it is deferred. Until it runs it is in `ServedCalls.waiting`,
and in DEFERRED in `ServedCalls.deferred`: whoever takes it out there decides what becomes of it, which is one
operation on a dict. Requests that carry no values of users, and messages without an id, are in neither: they run
when a thread comes to them.
"""

import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import final

from ...proto.v1 import agent_pb2
from ..channels.payloads import PayloadReader
from ..contracts.extension import Awaited
from ..contracts.messages import Handler, Incoming
from ..peers.peer import Peer

__all__ = ["CallKey", "ServedCall", "ServedState"]

CallKey = tuple[int, int]
"""The caller's wire id, and the request's id; that of a message without one is a negative number of its own."""


class ServedState(Enum):
    """What becomes of a request next: see above."""

    ARRIVED = auto()
    PARKED = auto()
    POSTPONED = auto()
    RUNNING = auto()
    DEFERRED = auto()
    DONE = auto()


@final
class ServedCall:
    """A request, and what is needed to run and to answer it."""

    __slots__ = (
        "awaited",
        "deadline",
        "envelope",
        "handler",
        "is_cancelled",
        "key",
        "message",
        "nbytes",
        "on_aborted",
        "payloads",
        "source",
        "state",
    )

    def __init__(self, source: Peer, envelope: agent_pb2.Envelope, handler: Handler | None) -> None:
        """Has arrived; its payloads may still be on their way.

        Args:
            source: the caller.
            envelope: the request's.
            handler: of its message type; None if there is none.
        """
        self.source = source
        self.envelope = envelope
        self.handler = handler
        self.key: CallKey = (source.id, envelope.id or -id(self))
        timeout = envelope.timeout_ms
        self.deadline = time.monotonic() + timeout / 1000 if timeout else 0.0
        """The time of `time.monotonic` until which its caller waits; 0 for ever."""
        self.state = ServedState.ARRIVED
        self.is_cancelled = False
        """Whether its caller has cancelled it while it ran."""
        self.payloads: PayloadReader | None = None
        """Reads its payloads, when all have come."""
        self.nbytes = 0
        """Of envelope and payloads."""
        self.awaited: Sequence[Awaited] = ()
        """What it waits for, or has waited for: kept alive until it runs."""
        self.message: Incoming | None = None
        """Itself, decoded, in DEFERRED."""
        self.on_aborted: Callable[[], None] | None = None
        """What is to be called in DEFERRED when nobody waits for the answer any more."""

    @property
    def is_expired(self) -> bool:
        """Whether its caller waits no longer."""
        return bool(self.deadline) and time.monotonic() >= self.deadline
