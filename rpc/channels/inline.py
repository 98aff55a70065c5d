"""The channel for small payloads, which travel inside their envelope."""

from typing import ClassVar, final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = ["InlineChannel"]


@final
class InlineChannel:
    """Copies payloads into their envelope. Keeps nothing."""

    name: ClassVar[str] = "inline"

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, None]:  # noqa: ARG002
        """Copies the bytes into the description."""
        return agent_pb2.Payload(inline=bytes(data)), None

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer:  # noqa: ARG002
        """Returns the bytes in the description."""
        return payload.inline

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Does nothing."""

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns True: whether the bytes are sent depends on the envelope alone."""
        return True

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Does nothing."""

    def drop_peer(self, peer: int, reason: str) -> None:
        """Does nothing."""

    def drop_connection(self, peer: int, reason: str) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""
