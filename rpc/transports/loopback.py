"""The transport from a worker to itself."""

import asyncio
from typing import ClassVar, final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import SHUT_DOWN, WorkerEnd
from .base import TransportClosedError, TransportListener

__all__ = ["LoopbackTransport"]


@final
class LoopbackTransport:
    """Delivers parsed copies of envelopes to this worker's own listener, on the event loop."""

    name: ClassVar[str] = "loopback"

    def __init__(self, loop: asyncio.AbstractEventLoop, me: WorkerInfo, listener: TransportListener) -> None:
        self._loop = loop
        self._me = me
        self._listener = listener
        self._closed = False

    def send(self, envelope: bytes) -> int:
        """Schedules the delivery."""
        if self._closed:
            raise TransportClosedError(SHUT_DOWN.reason)
        message = agent_pb2.Envelope.FromString(envelope)
        self._loop.call_soon_threadsafe(self._listener.on_envelope, self._me, message)
        return 0

    def withdraw(self, ticket: int) -> bool:  # noqa: ARG002
        """Returns False: there is no queue."""
        return False

    def connect(self) -> None:
        """Does nothing: the worker is always connected to itself."""

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:  # noqa: ARG002
        """Makes `send` raise TransportClosedError from now on."""
        self._closed = True
