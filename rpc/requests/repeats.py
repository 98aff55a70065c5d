"""Calls that may run more than once: when the connection to their worker has failed, they are sent again."""

import contextvars
import math
import time
from typing import final

from ...errors import Outcome, SendFailedError, WorkerLostError, WorkerSuspectError
from ..contracts.messages import Request

__all__ = ["CONNECTION_ERRORS", "Repeats"]

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""The pause before the second attempt, and the longest; each is twice as long as the one before."""

MAX_ABSENCE_S = 60.0
"""Seconds for which a call without a timeout waits for a worker that is lost, or does not answer."""

MIN_TIMEOUT_S = 0.001
"""Seconds that an attempt has at least."""

CONNECTION_ERRORS = (SendFailedError, WorkerLostError, WorkerSuspectError)


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
        self.pause = FIRST_PAUSE_S
        """Seconds before the next attempt."""
        self.context = contextvars.copy_context()
        """Of the thread that has made the call: such as the trace that it is part of."""
        self._ends_at = time.monotonic() + timeout if timeout else math.inf
        self._is_absent = False

    def seconds_left(self) -> float:
        """Returns the timeout of an attempt that begins now, 0 for none."""
        return max(self._ends_at - time.monotonic(), MIN_TIMEOUT_S) if self.timeout else 0.0

    def take_error(self, error: Exception, outcome: Outcome) -> bool:
        """Notes what an attempt fails with; returns whether there is to be another one."""
        if outcome is Outcome.RAN or self.is_cancelled or not isinstance(error, CONNECTION_ERRORS):
            return False
        self.outcome = self.outcome_with(outcome)
        if not self.timeout and (outcome is Outcome.UNKNOWN or not self._is_absent):
            self._ends_at = time.monotonic() + MAX_ABSENCE_S  # it was there until now
        self._is_absent = True
        self.error = error
        return self.has_time()

    def has_time(self) -> bool:
        """Returns whether another attempt can begin in time."""
        return time.monotonic() + self.pause < self._ends_at

    def take_pause(self) -> float:
        """Returns the seconds until the next attempt; the pause after that is longer."""
        pause, self.pause = self.pause, min(2 * self.pause, MAX_PAUSE_S)
        return pause

    def outcome_with(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the call if the latest attempt has this one."""
        return self.outcome if outcome is Outcome.NOT_SENT else outcome
