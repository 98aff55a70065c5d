"""Calls that may run more than once: when the connection to their worker has failed, they are sent again.

Between two attempts a call pauses, and nothing of it is in flight. It belongs to whoever takes it out of the calls
that pause: the next attempt, its cancellation, or the end of the agent.
"""

import asyncio
import contextvars
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, final

from ...errors import Outcome, RpcCancelledError, SendFailedError, WorkerLostError, WorkerSuspectError, set_outcome
from ..contracts.messages import Request
from ..contracts.worker import WorkerInfo
from ..execution.executor import Executor
from ..execution.futures import Future
from ..execution.kept_errors import copy_error
from .stats import CallCounter

__all__ = ["Retries", "Retry"]

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""The pause before the first retry, and the longest; each is twice as long as the one before."""

MAX_ABSENCE_S = 60.0
"""Seconds for which a call without a timeout waits for a worker that is lost, or does not answer."""

MIN_TIMEOUT_S = 0.001
"""Seconds that an attempt has at least."""

CONNECTION_ERRORS = (SendFailedError, WorkerLostError, WorkerSuspectError)

FindWorker = Callable[[str], WorkerInfo | None]


@final
class Retry:
    """One call that may be sent again."""

    future: Future[Any]
    """Of the call, whatever the attempt. Set with the first."""

    def __init__(
        self, retries: "Retries", worker: WorkerInfo, request: Request, timeout: float, depth: int
    ) -> None:
        """Begins with the first attempt.

        Args:
            retries: knows the calls that pause.
            worker: the worker called; others of its name are called later.
            request: what to send.
            timeout: seconds for all attempts together, 0 for none.
            depth: how many calls it is inside of.
        """
        self.name = worker.name
        self.request = request
        self.timeout = timeout
        self.depth = depth
        self.attempts = 0
        self.identifier = 0
        """Of the latest attempt."""
        self.is_cancelled = False
        self.outcome = Outcome.NOT_SENT
        """What has become of the call in the attempts so far."""
        self.error: Exception | None = None
        """What the latest attempt has failed with."""
        self.key = 0
        """Of the pause, for the counter of calls in flight."""
        self.pause = FIRST_PAUSE_S
        self.context = contextvars.copy_context()
        """Of the thread that has made the call: such as the trace that it is part of."""
        self._retries = retries
        self._ends_at = time.monotonic() + timeout if timeout else math.inf
        self._is_absent = False

    def seconds_left(self) -> float:
        """Returns the timeout of an attempt that begins now, 0 for none."""
        return max(self._ends_at - time.monotonic(), MIN_TIMEOUT_S) if self.timeout else 0.0

    def take_over(self, error: Exception, outcome: Outcome) -> bool:
        """Has the call sent again after a pause; returns False if the call fails now.

        Args:
            error: what the latest attempt fails with.
            outcome: of that attempt.
        """
        if outcome is Outcome.RAN or self.is_cancelled or not isinstance(error, CONNECTION_ERRORS):
            return False
        self.outcome = self.outcome_with(outcome)
        if not self.timeout and (outcome is Outcome.UNKNOWN or not self._is_absent):
            self._ends_at = time.monotonic() + MAX_ABSENCE_S  # it was there until now
        self._is_absent = True
        return self.pause_again(error)

    def pause_again(self, error: Exception) -> bool:
        """Pauses before the next attempt; returns False if there is no time for one, or the agent has ended."""
        if time.monotonic() + self.pause >= self._ends_at:
            return False
        self.error = error
        return self._retries.begin_pause(self)

    def outcome_with(self, outcome: Outcome) -> Outcome:
        """Returns the outcome of the call if the latest attempt has this one."""
        return self.outcome if outcome is Outcome.NOT_SENT else outcome

    def fail(self, error: Exception) -> None:
        """Fails a call of which no attempt is in flight."""
        set_outcome(error, self.outcome)
        self.future.set_exception(error)


@final
class Retries:
    """The calls of one agent that pause before they are sent again. Safe to use from any thread."""

    def __init__(
        self,
        executor: Executor,
        call_soon: Callable[..., None],
        calls: CallCounter,
        find_worker: FindWorker,
        send: Callable[[WorkerInfo, Retry], None],
    ) -> None:
        """Begins with no call.

        Args:
            executor: sends calls again, on its threads.
            call_soon: calls a function on the event loop, which times the pauses.
            calls: counts users' calls in flight; those that pause are.
            find_worker: returns the present worker of a name; None if there is none.
            send: sends a call again.
        """
        self._executor = executor
        self._call_soon = call_soon
        self._calls = calls
        self._find_worker = find_worker
        self._send = send
        self._keys = itertools.count(-1, -1)  # the ids of attempts are positive
        self._paused: dict[int, Retry] = {}
        self._closed_by: Exception | None = None

    def begin_pause(self, retry: Retry) -> bool:
        """Has a call sent again after its pause; returns False if the agent has ended."""
        retry.key = key = next(self._keys)
        pause, retry.pause = retry.pause, min(2 * retry.pause, MAX_PAUSE_S)
        self._calls.begin_request(key)
        self._paused[key] = retry
        try:
            self._call_soon(self._wait, key, pause)
        except RuntimeError:  # the event loop has ended
            return self._take(key) is None
        return self._closed_by is None or self._take(key) is None  # `close` has failed it

    def cancel(self, retry: Retry) -> bool:
        """Fails a call with RpcCancelledError if it pauses; returns whether it did."""
        if self._take(retry.key) is None:
            return False
        retry.fail(RpcCancelledError(retry.name))
        return True

    def close(self, error: Exception) -> None:
        """Fails the calls that pause, and has no others pause from now on."""
        self._closed_by = error
        for key in list(self._paused):
            if (retry := self._take(key)) is not None:
                retry.fail(copy_error(error))

    def _take(self, key: int) -> Retry | None:
        retry = self._paused.pop(key, None)
        if retry is not None:
            self._calls.end_request(key)
        return retry

    def _wait(self, key: int, seconds: float) -> None:
        """Called on the event loop."""
        asyncio.get_running_loop().call_later(seconds, self._executor.submit, self._send_again, key)

    def _send_again(self, key: int) -> None:
        """Runs on a thread of the executor."""
        retry = self._paused.pop(key, None)
        if retry is None:
            return
        try:
            error = retry.error
            worker = self._find_worker(retry.name)
            if worker is not None:
                retry.context.copy().run(self._send, worker, retry)
            elif error is not None and not retry.pause_again(error):
                retry.fail(error)
        except Exception as error:
            retry.fail(error)
        finally:
            self._calls.end_request(key)
