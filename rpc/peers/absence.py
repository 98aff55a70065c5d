"""Why nothing can be sent to a worker now."""

from dataclasses import dataclass
from typing import final

from ...errors import EvictedError, Outcome, WorkerLostError, WorkerSuspectError
from ..contracts.worker_end import WorkerEnd

__all__ = ["Absence"]


@final
@dataclass(frozen=True, slots=True)
class Absence:
    """Why nothing can be sent to a worker now.

    end: how it ended, or its connection did.
    is_lost: whether it will not come back.
    waits: whether calls wait for it.
    evicted: the name of this worker, if it was evicted itself.
    """

    end: WorkerEnd
    is_lost: bool = False
    waits: bool = False
    evicted: str = ""

    def as_error(self, worker: str) -> WorkerLostError | WorkerSuspectError | EvictedError:
        """Returns the error of a call to the worker with this name, which is not sent."""
        error: WorkerLostError | WorkerSuspectError | EvictedError
        if self.evicted:
            error = EvictedError(self.evicted, self.end.reason)
        else:
            error = self.end.as_error(worker) if self.is_lost else WorkerSuspectError(worker, self.end.reason)
        error.outcome = Outcome.NOT_SENT
        return error
