"""The counters of an agent: calls in flight, messages and bytes."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, final

from ..execution.ctrl_c import wait_interruptibly

__all__ = ["INLINE", "CallCounter", "TrafficStats"]

INLINE = "inline"
"""The channel of payloads inside the envelopes of their messages."""


@final
class CallCounter:
    """Counts calls in flight, and all calls there have been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._none_in_flight = threading.Condition(self._lock)
        self.waiters = 0
        self._is_closed = False
        self.requests: set[int] = set()
        """The ids of the calls in flight that this worker has sent, and of those that pause."""
        self.last_request = 0
        """The id of one of the latest calls that was sent: it changes with each."""
        self._others = 0
        self._began = 0
        self.served = 0
        """Those in flight that a thread of this worker is busy with."""

    @property
    def total(self) -> int:
        """A number that changes with each call that is sent, or begins to run here."""
        return (self._began << 64) + self.last_request

    @property
    def in_flight(self) -> int:
        """The number of calls in flight."""
        return self._others + len(self.requests)

    def begin_request(self, identifier: int) -> None:
        """Counts a call that is sent, or pauses, by its id."""
        self.requests.add(identifier)
        self.last_request = identifier

    def end_request(self, identifier: int) -> None:
        """Counts the end of a call that was sent. Does nothing if it has ended."""
        self.requests.discard(identifier)
        if self.waiters:
            with self._lock:
                self._notify()

    def begin(self) -> None:
        """Counts a call that begins to run."""
        with self._lock:
            self._others += 1
            self._began += 1

    def begin_serving(self) -> None:
        """Counts a call that a thread begins to run."""
        with self._lock:
            self._others += 1
            self._began += 1
            self.served += 1

    def end_serving(self, *, deferred: bool) -> None:
        """Counts a call that no thread is busy with any more; `deferred` if it is still to be answered."""
        with self._lock:
            self.served -= 1
            if not deferred:
                self._others -= 1
                if self.waiters:
                    self._notify()

    def end(self) -> None:
        """Counts the end of a call."""
        with self._lock:
            self._others -= 1
            self._notify()

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

    def _notify(self) -> None:
        if self.waiters and not self.in_flight:
            self._none_in_flight.notify_all()


@final
class _LinkTraffic:
    """What has gone between this worker and one other, or itself."""

    __slots__ = ("apart_received", "apart_sent", "inline_received", "inline_sent", "received", "sent")

    def __init__(self) -> None:
        self.sent = self.received = 0
        """Messages."""
        self.inline_sent = self.inline_received = 0
        """Bytes inside the messages."""
        self.apart_sent: dict[str, int] = {}
        """Bytes outside them, by channel."""
        self.apart_received: dict[str, int] = {}

    def as_json(self) -> dict[str, Any]:
        """Returns the counts; channels that have carried nothing are left out."""
        return {
            "messages_sent": self.sent,
            "messages_received": self.received,
            "bytes_sent": {INLINE: self.inline_sent, **self.apart_sent},
            "bytes_received": {INLINE: self.inline_received, **self.apart_received},
        }


@final
class TrafficStats:
    """Counts messages, and bytes of bodies and tensors, in both directions, by worker and channel.

    Workers are named by wire id. A broadcast counts once for this worker, and on the link to each receiver.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages_sent = 0
        self._messages_received = 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._links: defaultdict[int, _LinkTraffic] = defaultdict(_LinkTraffic)

    def sent(self, worker: int, nbytes: int) -> None:
        """Counts a message to a worker that has been sent with all of its bytes inside it."""
        with self._lock:
            self._messages_sent += 1
            self._bytes_sent += nbytes
            link = self._links[worker]
            link.sent += 1
            link.inline_sent += nbytes

    def sent_by_channel(self, worker: int, nbytes: int, inline: int, apart: Mapping[str, int]) -> None:
        """Counts a message that has been sent with payloads outside it.

        Args:
            worker: the receiver.
            nbytes: all bytes, without those of a broadcast that another message has counted.
            inline: bytes inside the message.
            apart: bytes outside it, by channel.
        """
        with self._lock:
            self._messages_sent += 1
            self._bytes_sent += nbytes
            link = self._links[worker]
            link.sent += 1
            link.inline_sent += inline
            for channel, count in apart.items():
                link.apart_sent[channel] = link.apart_sent.get(channel, 0) + count

    def sent_again(self, nbytes: int) -> None:
        """Counts a payload that is sent once more, because it did not arrive."""
        with self._lock:
            self._bytes_sent += nbytes

    def received(self, worker: int, nbytes: int) -> None:
        """Counts a message of a worker that has arrived with all of its bytes inside it."""
        with self._lock:
            self._messages_received += 1
            self._bytes_received += nbytes
            link = self._links[worker]
            link.received += 1
            link.inline_received += nbytes

    def received_by_channel(self, worker: int, by_channel: Mapping[str, int]) -> None:
        """Counts a message that has arrived; its bytes by channel, those inside it as INLINE."""
        with self._lock:
            self._messages_received += 1
            link = self._links[worker]
            link.received += 1
            for channel, count in by_channel.items():
                self._bytes_received += count
                if channel == INLINE:
                    link.inline_received += count
                else:
                    link.apart_received[channel] = link.apart_received.get(channel, 0) + count

    def counts(self) -> dict[str, int]:
        """Returns the four counts by name."""
        with self._lock:
            return {
                "messages_sent": self._messages_sent,
                "messages_received": self._messages_received,
                "bytes_sent": self._bytes_sent,
                "bytes_received": self._bytes_received,
            }

    def by_worker(self, name_of: Callable[[int], str]) -> dict[str, dict[str, Any]]:
        """Returns the counts of each link by the name of the worker, that of its last incarnation.

        Args:
            name_of: returns the name of a worker, current or former.
        """
        with self._lock:
            return {name_of(worker): self._links[worker].as_json() for worker in sorted(self._links)}
