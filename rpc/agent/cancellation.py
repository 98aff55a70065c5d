"""Requests that have arrived and do not run yet: those that their callers can still cancel."""

from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo

__all__ = ["CancellableRequests"]


@final
class CancellableRequests:
    """Decides between the begin of a request and its cancellation: only one of `begin` and `cancel` succeeds.

    Takes no lock: each step is one operation on a set.
    """

    def __init__(self) -> None:
        self._waiting: set[tuple[int, int]] = set()

    def add(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Registers a request that has arrived; its payloads may still be on their way."""
        self._waiting.add((source.wire_id, envelope.id))

    def begin(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """Returns whether a request may run: whether it was not cancelled."""
        return self._remove(source, envelope)

    def cancel(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """Cancels the request with this envelope's id; returns False if it has begun, or never arrived."""
        return self._remove(source, envelope)

    def discard(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Forgets a request that will not run."""
        self._remove(source, envelope)

    def cancel_all(self, source: WorkerInfo) -> None:
        """Cancels the requests of a worker that have not begun."""
        for request in [each for each in self._waiting.copy() if each[0] == source.wire_id]:
            self._waiting.discard(request)

    def __len__(self) -> int:
        return len(self._waiting)

    def _remove(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        try:
            self._waiting.remove((source.wire_id, envelope.id))
        except KeyError:
            return False
        return True
