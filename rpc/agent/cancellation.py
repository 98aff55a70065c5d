"""Requests that have come and have not begun to run: those that can still be cancelled."""

from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo

__all__ = ["CancellableRequests"]


@final
class CancellableRequests:
    """Takes no lock: each step is one operation on a set, and only one of `begin` and `cancel` succeeds."""

    def __init__(self) -> None:
        self._waiting: set[tuple[int, int]] = set()

    def add(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """A request has come; its payloads may still be on their way."""
        self._waiting.add((source.id, envelope.id))

    def begin(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """A request is about to run; False if it was cancelled, and must not."""
        return self._remove(source, envelope)

    def cancel(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """The request with this envelope's id is not wanted any more; False if it has begun, or never came."""
        return self._remove(source, envelope)

    def forget(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """A request will not run."""
        self._remove(source, envelope)

    def __len__(self) -> int:
        return len(self._waiting)

    def _remove(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        try:
            self._waiting.remove((source.id, envelope.id))
        except KeyError:
            return False
        return True
