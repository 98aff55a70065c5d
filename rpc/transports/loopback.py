"""The transport from a worker to itself."""

from collections.abc import Sequence
from typing import Any, final

from ...proto.v1 import agent_pb2
from ..contracts.worker_end import SHUT_DOWN, WorkerEnd
from ..execution.futures import Future
from ..execution.waiter import SocketWaiter
from ..wire.attached import embed
from .base import Connecting, TransportClosedError, TransportListener

__all__ = ["LoopbackTransport"]


@final
class LoopbackTransport:
    """Delivers parsed copies of envelopes to this worker itself, on the thread that sends."""

    @property
    def name(self) -> str:
        """The name in debug info."""
        return "loopback"

    @property
    def queued_bytes(self) -> int:
        """Returns 0: there is no queue."""
        return 0

    def __init__(self, me: TransportListener) -> None:
        """Args: me: this worker."""
        self._me = me
        self._closed = False
        self._connected = Connecting()
        self._connected.set_result(None)

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> int:
        """Delivers an envelope."""
        if self._closed:
            raise TransportClosedError(SHUT_DOWN.reason)
        envelope = embed(envelope, attached)
        self._me.on_envelope(agent_pb2.Envelope.FromString(envelope), len(envelope))
        return 0

    def withdraw(self, ticket: int, beginning: bytes) -> bool:  # noqa: ARG002
        """Returns False: there is no queue."""
        return False

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        """Does nothing: answers arrive on the threads that send them."""

    def connect(self) -> Connecting:
        """Does nothing: the worker is always connected to itself."""
        return self._connected

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:  # noqa: ARG002
        """Makes `send` raise TransportClosedError from now on."""
        self._closed = True
