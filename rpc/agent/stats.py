"""What an agent counts."""

import threading
from typing import final

__all__ = ["CallCounter", "TrafficStats"]


@final
class CallCounter:
    """How many users' calls are under way here, and how many there have been."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.running = 0
        self.total = 0

    def begin(self) -> None:
        """A call has been sent, or has begun to run."""
        with self._changed:
            self.running += 1
            self.total += 1

    def end(self) -> None:
        """It is over."""
        with self._changed:
            self.running -= 1
            if not self.running:
                self._changed.notify_all()

    def wait_for_none(self, seconds: float | None) -> bool:
        """Waits until nothing runs; False if that takes more than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.running, seconds)


@final
class TrafficStats:
    """Messages, and bytes of bodies and tensors, in both directions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"messages_sent": 0, "messages_received": 0, "bytes_sent": 0, "bytes_received": 0}

    def sent(self, nbytes: int) -> None:
        """A message has left."""
        with self._lock:
            self._counts["messages_sent"] += 1
            self._counts["bytes_sent"] += nbytes

    def sent_again(self, nbytes: int) -> None:
        """A payload did not arrive and leaves once more."""
        with self._lock:
            self._counts["bytes_sent"] += nbytes

    def received(self, nbytes: int) -> None:
        """A message has come."""
        with self._lock:
            self._counts["messages_received"] += 1
            self._counts["bytes_received"] += nbytes

    def counts(self) -> dict[str, int]:
        """All four."""
        with self._lock:
            return dict(self._counts)
