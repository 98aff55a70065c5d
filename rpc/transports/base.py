"""What a transport is."""

from typing import ClassVar, Protocol

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import WorkerEnd

__all__ = ["Transport", "TransportClosedError", "TransportListener"]


class TransportClosedError(Exception):
    """The peer is gone; the text says how."""


class Transport(Protocol):
    """Carries envelopes to one peer and back, each at most once.

    Owned by the agent, which calls `close` exactly once.
    """

    name: ClassVar[str]

    def send(self, envelope: bytes) -> int:
        """Queues one serialized envelope. Called from any thread; never blocks on the peer.

        Returns:
            A ticket that `withdraw` takes.

        Raises:
            TransportClosedError: the peer is gone.
        """

    def withdraw(self, ticket: int) -> bool:
        """Takes an envelope back; False if it is on its way already. Called on the event loop."""

    def connect(self) -> None:
        """Connects now rather than at the first send, so that the loss of the peer is noticed."""

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        """Sends what is queued and a goodbye, then releases the connection.

        Args:
            drain: seconds that it may take.
            end: how this worker ends, for the goodbye.
            dial: whether to say it also to a peer to which there is no connection.
        """


class TransportListener(Protocol):
    """Whom transports report to, on the event loop. Must not block."""

    def on_envelope(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """An envelope has arrived."""

    def on_closed(self, peer: WorkerInfo, end: WorkerEnd) -> None:
        """The connection is over: nothing that is queued or outstanding will be answered."""
