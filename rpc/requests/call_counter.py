"""Counts the calls of an agent that are in flight."""

import threading
from typing import final

from ..execution.ctrl_c import wait_interruptibly

__all__ = ["CallCounter"]


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
