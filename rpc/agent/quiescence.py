"""When a worker may leave without anything being lost: when no calls are under way."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from ...errors import RpcTimeoutError
from ..collectives.all_gather import WARN_INTERVAL_S, AllGatherService
from .stats import CallCounter

if TYPE_CHECKING:
    from ..contracts.agent import RpcAgent

__all__ = ["Quiescence"]

log = logging.getLogger(__name__)


@final
class Quiescence:
    """Waits for the calls of one agent, or of all workers of its group, and says what it waits for."""

    def __init__(
        self,
        agent: "RpcAgent",
        calls: CallCounter,
        all_gather_service: AllGatherService,
        unanswered: Callable[[], Mapping[str, int]],
    ) -> None:
        """Args: whose; its count of calls under way; its gatherings; its unanswered calls by worker name."""
        self._agent = agent
        self._calls = calls
        self._all_gather_service = all_gather_service
        self._unanswered = unanswered

    def wait_here(self, timeout: float) -> None:
        """Returns when this worker has no calls under way. Raises RpcTimeoutError after `timeout` seconds."""
        self._wait_here(time.monotonic() + timeout if timeout else None, timeout)

    def wait_everywhere(self, timeout: float, failed: Mapping[int, str]) -> Mapping[int, str]:
        """Returns when no worker has calls under way and none can arise.

        Every worker waits until nothing runs on it and tells how many calls there have been. Two rounds with
        the same numbers mean that nothing happened in between. (After Mattern's four-counter method.)

        Args:
            timeout: seconds, 0 for none.
            failed: the ids of the workers whose failure is known here, and why they failed; it may grow meanwhile.

        Returns:
            Those whose failure is known to any worker.

        Raises:
            RpcTimeoutError: it took more than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout if timeout else None
        before = None
        while True:
            self._wait_here(deadline, timeout)
            left = max(1e-3, deadline - time.monotonic()) if deadline else 0.0
            workers = self._agent.workers()
            try:
                told = self._all_gather_service.all_gather(
                    "shutdown",
                    (self._calls.total, dict(failed)),
                    workers,
                    left,
                    "shutdown",
                    self._say_who_is_awaited,
                )
            except RpcTimeoutError as error:
                raise RpcTimeoutError(error.worker, timeout, "shutdown waits for others to shut down:") from None
            totals = {worker: total for worker, (total, _) in told.items()}
            if totals == before:
                return {worker: why for _, known in told.values() for worker, why in known.items()}
            before = totals

    def _wait_here(self, deadline: float | None, timeout: float) -> None:
        me = self._agent.info.name
        while True:
            left = max(0.0, deadline - time.monotonic()) if deadline else WARN_INTERVAL_S
            if self._calls.wait_for_none(min(left, WARN_INTERVAL_S)):
                return
            if deadline and time.monotonic() >= deadline:
                raise RpcTimeoutError(me, timeout, f"shutdown waits for {self._under_way()} on worker")
            log.info("shutdown of worker %s waits for %s", me, self._under_way())

    def _under_way(self) -> str:
        """The calls that are under way, in words."""
        sent = self._unanswered()
        parts = [f"{count} calls to {name!r}" for name, count in sorted(sent.items())]
        if (served := self._calls.in_flight - sum(sent.values())) > 0:
            parts.append(f"{served} calls from others")
        return " and ".join(parts) or "calls that are about to end"

    def _say_who_is_awaited(self, names: Sequence[str]) -> None:
        log.info("shutdown of worker %s waits for %s to shut down", self._agent.info.name, ", ".join(names))
