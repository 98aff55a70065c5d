"""A request that this worker has sent, or is about to send, until it is answered."""

from dataclasses import dataclass
from typing import Any

from ..contracts.messages import Handler, Outgoing
from ..contracts.worker import WorkerInfo
from ..execution.futures import Future

__all__ = ["PendingRequest"]


@dataclass(slots=True)
class PendingRequest:
    """A request that is not answered yet."""

    identifier: int
    future: Future[Any]
    worker: WorkerInfo
    handler: Handler
    timeout: float
    depth: int = 0
    """How many calls it is inside of."""
    is_waiting: bool = False
    """Whether it waits for capacity, and nothing of it has been sent."""
    sent: Outgoing | None = None
    """Set once it is sent, if it can be cancelled."""
