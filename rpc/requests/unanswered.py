"""What is left of requests until they are answered, or never will be: also of those that have failed here."""

from collections import OrderedDict
from typing import final

from ..contracts.worker import WorkerInfo

__all__ = ["Unanswered"]

MAX_ORPHANS = 1 << 16
"""Requests that have failed because their worker was suspect, and whose answers may still come."""


@final
class Unanswered:
    """The requests of one agent that other workers have not answered. Safe to use from any thread."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, object]] = {}
        """The worker and the `keep` of each request, by its id."""
        self._orphans: OrderedDict[int, int] = OrderedDict()
        """The worker of each request that has failed because that was suspect, and that it may answer all the
        same: references in the answer must be counted. The first ones are forgotten when there are too many."""

    def drop(self, identifier: int) -> None:
        """Forgets a request that is answered, or was not sent."""
        self.kept.pop(identifier, None)

    def worker_of(self, identifier: int) -> int | None:
        """Returns the wire id of the worker that was sent a request, if something is kept for it."""
        return self.kept.get(identifier, (None, None))[0]

    def of(self, worker: WorkerInfo) -> set[int]:
        """Returns the ids of the requests to a worker for which something is kept."""
        return {i for i, (destination, _) in self.kept.copy().items() if destination == worker.wire_id}

    def add_orphan(self, worker: WorkerInfo, identifier: int) -> None:
        """Notes a request that has failed because its worker is suspect."""
        self._orphans[identifier] = worker.wire_id
        while len(self._orphans) > MAX_ORPHANS:
            self._orphans.popitem(last=False)

    def take_orphan(self, source: WorkerInfo, identifier: int) -> bool:
        """Returns, once, whether such a request is answered by its worker."""
        if self._orphans.get(identifier) != source.wire_id:
            return False
        return self._orphans.pop(identifier, None) is not None

    def drop_worker(self, worker: WorkerInfo) -> None:
        """Forgets the requests to a worker that is lost."""
        for identifier in self.of(worker):
            self.kept.pop(identifier, None)
        for identifier, destination in self._orphans.copy().items():
            if destination == worker.wire_id:
                self._orphans.pop(identifier, None)
