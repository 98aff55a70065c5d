"""Requests that have arrived and do not run yet, and will not if their callers wait for them no longer."""

import time
from enum import Enum, auto
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo

__all__ = ["NotBegun", "WaitingRequests"]


class NotBegun(Enum):
    """Why a request is not to run."""

    CANCELLED = auto()
    """Its caller has cancelled it."""
    EXPIRED = auto()
    """The time is up that its caller waits."""
    ABANDONED = auto()
    """Its caller is lost."""


@final
class WaitingRequests:
    """Decides between the begin of a request and its end before that: only one of them happens.

    Takes no lock: each step is one operation on a dict.
    """

    def __init__(self) -> None:
        self._deadlines: dict[tuple[int, int], float] = {}
        """By worker and id, the time of `time.monotonic` at which a request expires; 0 for never."""
        self._lost: set[int] = set()
        """The workers whose requests do not begin any more."""

    def add(self, source: WorkerInfo, envelope: agent_pb2.Envelope, *, waits: bool) -> None:
        """Registers a request that has arrived; its payloads may still be on their way.

        Args:
            source: the caller.
            envelope: the request's.
            waits: whether it may take a while until it begins.
        """
        key = source.wire_id, envelope.id
        timeout = envelope.timeout_ms if waits else 0
        self._deadlines[key] = time.monotonic() + timeout / 1000 if timeout else 0.0
        if self._lost and source.wire_id in self._lost:  # which may have been told before it was registered
            self._deadlines.pop(key, None)

    def begin(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> NotBegun | None:
        """Has a request begin to run; returns why not, if it does not."""
        deadline = self._deadlines.pop((source.wire_id, envelope.id), None)
        if deadline is None:
            return NotBegun.ABANDONED if source.wire_id in self._lost else NotBegun.CANCELLED
        if deadline and time.monotonic() >= deadline:
            return NotBegun.EXPIRED
        return None

    def cancel(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> bool:
        """Cancels the request with this envelope's id; returns False if it has begun, or never arrived."""
        return self._deadlines.pop((source.wire_id, envelope.id), None) is not None

    def discard(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """Forgets a request that will not run."""
        self._deadlines.pop((source.wire_id, envelope.id), None)

    def drop_worker(self, worker: WorkerInfo) -> None:
        """Keeps the requests of a worker that is lost from beginning."""
        self._lost.add(worker.wire_id)
        self.cancel_all(worker)

    def cancel_all(self, worker: WorkerInfo) -> None:
        """Keeps the requests of a worker that have arrived from beginning."""
        for key in list(self._deadlines):
            if key[0] == worker.wire_id:
                self._deadlines.pop(key, None)

    def __len__(self) -> int:
        return len(self._deadlines)
