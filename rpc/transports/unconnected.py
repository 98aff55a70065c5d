"""Transports that need no connection: from a worker to itself, and to a worker that is lost."""

from collections.abc import Sequence
from typing import Any, Final, final

from ...proto.v1 import agent_pb2
from ..contracts.worker import SHUT_DOWN, WorkerEnd
from ..execution.futures import Future
from ..execution.poller import SocketWaiter
from ..wire.parsing import embed
from .base import Connecting, TransportClosedError, TransportListener

__all__ = ["ENDED", "LoopbackTransport"]

_CONNECTED: Final = Connecting()
_CONNECTED.set_result(None)


class _Unconnected:
    """What they have in common: there is no queue, and nothing to wait for."""

    queued_bytes = 0

    def withdraw(self, beginning: bytes) -> bool:  # noqa: ARG002
        return False

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        """Does nothing: nothing arrives, or it does on the thread that sends."""

    def connect(self) -> Connecting:
        return _CONNECTED

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        pass


@final
class _EndedTransport(_Unconnected):
    """A transport by which nothing can be sent."""

    name = "ended"

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:  # noqa: ARG002
        raise TransportClosedError("it is lost")


ENDED: Final = _EndedTransport()
"""The transport to every worker that is lost, for which nothing is kept."""


@final
class LoopbackTransport(_Unconnected):
    """Delivers parsed copies of envelopes to this worker itself, on the thread that sends, until it is closed."""

    name = "loopback"

    def __init__(self, me: TransportListener) -> None:
        self._me = me
        self._closed = False

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        """Delivers an envelope."""
        if self._closed:
            raise TransportClosedError(SHUT_DOWN.reason)
        envelope = embed(envelope, attached)
        self._me.on_envelope(agent_pb2.Envelope.FromString(envelope), len(envelope))

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:  # noqa: ARG002
        """Makes `send` raise TransportClosedError from now on."""
        self._closed = True
