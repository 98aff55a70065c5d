"""What takes the place of the transport to a worker that is lost: nothing is kept for it."""

from collections.abc import Sequence
from typing import Any, Final, final

from ..contracts.worker_end import WorkerEnd
from ..execution.futures import Future
from ..execution.waiter import SocketWaiter
from .base import Connecting, TransportClosedError

__all__ = ["ENDED"]

_CONNECTED: Final = Connecting()
_CONNECTED.set_result(None)


_REASON: Final = "it is lost"


@final
class _EndedTransport:
    """A Transport by which nothing can be sent."""

    name = "ended"
    queued_bytes = 0

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> int:  # noqa: ARG002
        """Raises TransportClosedError."""
        raise TransportClosedError(_REASON)

    def withdraw(self, ticket: int, beginning: bytes) -> bool:  # noqa: ARG002
        """Returns False: the queue has been dropped."""
        return False

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        """Does nothing."""

    def connect(self) -> Connecting:
        """Returns a future that is done, since there can be no connection."""
        return _CONNECTED

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        """Does nothing."""


ENDED: Final = _EndedTransport()
"""The transport to every worker that is lost."""
