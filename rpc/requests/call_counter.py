"""Counts the calls of an agent that are in flight."""

import threading
from typing import final

from ..execution.ctrl_c import wait_interruptibly
from .served_calls import CallKey, ServedCall

__all__ = ["CallCounter"]


@final
class CallCounter:
    """Counts calls in flight, and all calls there have been."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._none_in_flight = threading.Condition(self._lock)
        self.waiters = 0
        """Threads in `wait_for_none`. An end that finds none need not `notify`: who comes later sees it."""
        self._is_closed = False
        self.requests: set[int] = set()
        """The ids of the calls in flight that this worker has sent, and of those that pause."""
        self.last_request = 0
        """The id of one of the latest calls that was sent: it changes with each."""
        self.serving: dict[CallKey, ServedCall] = {}
        """Those of others that a thread of this worker is busy with."""
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
        return len(self.serving) + self._deferred + len(self.requests)

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
