"""The counters of an agent: calls in flight, messages and bytes."""

import threading
from typing import final

__all__ = ["CallCounter", "TrafficStats"]


@final
class CallCounter:
    """Counts calls in flight, and all calls there have been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._none_in_flight = threading.Condition(self._lock)
        self._waiters = 0
        self._requests: set[int] = set()
        self._others = 0
        self.total = 0
        self.served = 0
        """Those in flight that a thread of this worker is busy with."""

    @property
    def in_flight(self) -> int:
        """The number of calls in flight."""
        return self._others + len(self._requests)

    def begin_request(self, identifier: int) -> None:
        """Counts a call that is sent, by its id."""
        with self._lock:
            self._requests.add(identifier)
            self.total += 1

    def end_request(self, identifier: int) -> None:
        """Counts the end of a call that was sent. Does nothing if it has ended."""
        self._requests.discard(identifier)
        if self._waiters:
            with self._lock:
                self._notify()

    def begin(self) -> None:
        """Counts a call that begins to run."""
        with self._lock:
            self._others += 1
            self.total += 1

    def begin_serving(self) -> None:
        """Counts a call that a thread begins to run."""
        with self._lock:
            self._others += 1
            self.total += 1
            self.served += 1

    def end_serving(self, *, deferred: bool) -> None:
        """Counts a call that no thread is busy with any more; `deferred` if it is still to be answered."""
        with self._lock:
            self.served -= 1
            if not deferred:
                self._others -= 1
                self._notify()

    def end(self) -> None:
        """Counts the end of a call."""
        with self._lock:
            self._others -= 1
            self._notify()

    def wait_for_none(self, seconds: float | None) -> bool:
        """Waits until no call is in flight; returns False if that takes more than `seconds`."""
        with self._lock:
            self._waiters += 1
            try:
                return self._none_in_flight.wait_for(lambda: not self.in_flight, seconds)
            finally:
                self._waiters -= 1

    def _notify(self) -> None:
        if self._waiters and not self.in_flight:
            self._none_in_flight.notify_all()


@final
class TrafficStats:
    """Counts messages, and bytes of bodies and tensors, in both directions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages_sent = 0
        self._messages_received = 0
        self._bytes_sent = 0
        self._bytes_received = 0

    def sent(self, nbytes: int) -> None:
        """Counts a message that has been sent."""
        with self._lock:
            self._messages_sent += 1
            self._bytes_sent += nbytes

    def sent_again(self, nbytes: int) -> None:
        """Counts a payload that is sent once more, because it did not arrive."""
        with self._lock:
            self._bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        """Counts a message that has arrived."""
        with self._lock:
            self._messages_received += 1
            self._bytes_received += nbytes

    def counts(self) -> dict[str, int]:
        """Returns the four counts by name."""
        with self._lock:
            return {
                "messages_sent": self._messages_sent,
                "messages_received": self._messages_received,
                "bytes_sent": self._bytes_sent,
                "bytes_received": self._bytes_received,
            }
