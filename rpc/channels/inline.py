"""Payloads inside their envelope."""

from typing import ClassVar, final

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = ["InlineChannel"]


@final
class InlineChannel:
    """For small payloads: the envelope carries them."""

    name: ClassVar[str] = "inline"

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, None]:  # noqa: ARG002
        """Copies the bytes."""
        return agent_pb2.Payload(inline=bytes(data)), None

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer:  # noqa: ARG002
        """The bytes in the envelope."""
        return payload.inline

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """They came with the envelope."""

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """They go with the envelope."""
        return True

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """They go with the envelope."""

    def drop(self, peer: int, reason: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is kept."""
