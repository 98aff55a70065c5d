"""Waiting until no calls are in flight, so that a worker can leave without losing one."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from ...errors import RpcTimeoutError, WorkerLostError
from ..collectives.all_gather import WARN_INTERVAL_S, AllGatherService
from ..contracts.agent import RpcAgent
from ..requests.call import CallCounter
from ..requests.server import Server

__all__ = ["Quiescence"]

log = logging.getLogger(__name__)


@final
class Quiescence:
    """Waits for the calls of one agent, or of all workers of its group, and logs what it waits for."""

    def __init__(
        self,
        agent: RpcAgent,
        calls: CallCounter,
        server: Server,
        all_gathers: AllGatherService,
        unanswered: Callable[[], Mapping[str, int]],
    ) -> None:
        """Makes the wait of one agent. Args: unanswered: see `Caller.count_unanswered`."""
        self._agent = agent
        self._calls = calls
        self._server = server
        self._all_gathers = all_gathers
        self._unanswered = unanswered

    def wait_everywhere(self, timeout: float, failed: Mapping[int, str]) -> Mapping[int, str]:
        """Waits until no worker has calls in flight and none can begin.

        Every worker waits until it has none, and tells the others which calls were the latest. Two rounds with the
        same calls mean that nothing happened in between. (Mattern's four-counter method, with names for numbers.)

        Args:
            timeout: seconds after which this raises RpcTimeoutError; 0 for none.
            failed: the ids of the workers that are known here to have failed, and why; it may grow meanwhile.

        Returns:
            The same for the workers that are known anywhere to have failed.
        """
        deadline = time.monotonic() + timeout if timeout else None
        before = None
        while True:
            self.wait_here(timeout, deadline)
            left = max(1e-3, deadline - time.monotonic()) if deadline else 0.0
            mine = (self._calls.latest, dict(failed))
            try:
                told = self._all_gathers.all_gather(
                    "shutdown", mine, self._agent.workers(), left, "shutdown", self._log_missing
                )
            except RpcTimeoutError as error:
                raise RpcTimeoutError(error.worker, timeout, "shutdown waits for others to shut down:") from None
            except WorkerLostError:  # they shut down without this worker
                return dict(failed)
            latest = {worker: calls for worker, (calls, _) in told.items()}
            if latest == before:
                return {worker: why for _, known in told.values() for worker, why in known.items()}
            before = latest

    def wait_here(self, timeout: float, deadline: float | None = None) -> None:
        """Waits until this worker has no calls in flight. Raises RpcTimeoutError after `timeout` seconds.

        Args:
            timeout: 0 for none.
            deadline: when these seconds are over, by `time.monotonic`, if they have begun already.
        """
        me = self._agent.info.name
        if timeout and deadline is None:
            deadline = time.monotonic() + timeout
        logs_at = time.monotonic() + WARN_INTERVAL_S
        while True:
            now = time.monotonic()
            ends = [logs_at - now, self._server.calls.seconds_left(), deadline and deadline - now]
            if self._calls.wait_for_none(max(0.0, min(each for each in ends if each is not None))):
                return
            self._server.abort_expired()
            now = time.monotonic()
            if deadline and now >= deadline:
                raise RpcTimeoutError(me, timeout, f"shutdown waits for {self._in_flight()} on worker")
            if now >= logs_at:
                log.info("shutdown of worker %s waits for %s", me, self._in_flight())
                logs_at = now + WARN_INTERVAL_S

    def describe(self) -> str:
        """Returns what the agent waits for."""
        return self._in_flight() if self._calls.in_flight else "others to shut down"

    def _in_flight(self) -> str:
        """Returns a description of the calls in flight."""
        sent = self._unanswered()
        parts = [f"{count} calls to {name!r}" for name, count in sorted(sent.items())]
        if (served := self._calls.in_flight - sum(sent.values())) > 0:
            parts.append(f"{served} calls from others")
        return " and ".join(parts) or "calls that are about to end"

    def _log_missing(self, names: Sequence[str]) -> None:
        log.info("shutdown of worker %s waits for %s to shut down", self._agent.info.name, ", ".join(names))
