"""The counters of an agent: calls in flight, messages and bytes."""

import threading
from typing import final

__all__ = ["CallCounter", "TrafficStats"]


@final
class CallCounter:
    """Counts calls in flight, and all calls there have been."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.in_flight = 0
        self.total = 0

    def begin(self) -> None:
        """Counts a call that is sent, or begins to run."""
        with self._changed:
            self.in_flight += 1
            self.total += 1

    def end(self) -> None:
        """Counts the end of a call."""
        with self._changed:
            self.in_flight -= 1
            if not self.in_flight:
                self._changed.notify_all()

    def wait_for_none(self, seconds: float | None) -> bool:
        """Waits until no call is in flight; returns False if that takes more than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.in_flight, seconds)


@final
class TrafficStats:
    """Counts messages, and bytes of bodies and tensors, in both directions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"messages_sent": 0, "messages_received": 0, "bytes_sent": 0, "bytes_received": 0}

    def sent(self, nbytes: int) -> None:
        """Counts a message that has been sent."""
        with self._lock:
            self._counts["messages_sent"] += 1
            self._counts["bytes_sent"] += nbytes

    def sent_again(self, nbytes: int) -> None:
        """Counts a payload that is sent once more, because it did not arrive."""
        with self._lock:
            self._counts["bytes_sent"] += nbytes

    def received(self, nbytes: int) -> None:
        """Counts a message that has arrived."""
        with self._lock:
            self._counts["messages_received"] += 1
            self._counts["bytes_received"] += nbytes

    def counts(self) -> dict[str, int]:
        """Returns the four counts by name."""
        with self._lock:
            return dict(self._counts)
