"""Logs each worker that has failed in one line, however often and by whomever this worker learns of it."""

import logging
import threading
from collections.abc import Mapping
from typing import final

from ...errors import LossCause
from ..contracts.agent import RpcAgent
from ..contracts.watcher import WorkerWatcher
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd

__all__ = ["FailureLog"]

MAX_NAMED = 8
"""The number of missing workers that a log line names at most."""

log = logging.getLogger(__name__)


@final
class FailureLog(WorkerWatcher):
    """The workers that have failed, as one worker knows. Safe to use from any thread."""

    def __init__(self, *, dynamic: bool) -> None:
        """Args: dynamic: whether the group is a dynamic one."""
        self._dynamic = dynamic
        self.failed: dict[int, str] = {}
        """The ids of workers that were lost without leaving, and why they are lost; it grows."""
        self._lock = threading.Lock()
        self._logged: set[int] = set()

    def on_worker_lost(self, worker: WorkerInfo, end: WorkerEnd) -> None:
        """Logs a worker that is lost, and counts it as failed if it did not leave."""
        # Who leaves a dynamic group need not say goodbye to a worker that it has never talked to.
        if end.orderly or (self._dynamic and end.cause is LossCause.UNREACHABLE):
            log.info("worker %s is lost: %s", worker.name, end.reason)
            return
        with self._lock:
            level = logging.INFO if worker.wire_id in self._logged else logging.WARNING
            self._logged.add(worker.wire_id)
        log.log(level, "worker %s is lost: %s", worker.name, end.reason)
        self.failed[worker.wire_id] = end.reason  # not before: a shutdown says that it goes without this worker

    def on_shutdown(self, agent: RpcAgent, failed: Mapping[int, str]) -> None:
        """Logs the workers that take no part in a shutdown, and have not been logged.

        `failed` are the ids of the workers that are known anywhere to have failed, and why.
        """
        with self._lock:
            new = failed.keys() - self._logged
            self._logged |= new
        missing = [f"{each.name} ({failed[each.wire_id]})" for each in agent.workers() if each.wire_id in new]
        if missing:
            more = f", and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
            names = ", ".join(missing[:MAX_NAMED])
            log.warning("worker %s shuts down without %s%s", agent.info.name, names, more)
