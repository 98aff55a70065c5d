"""The channel for large payloads of a worker's calls to itself."""

import itertools
from typing import ClassVar, final

import torch

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = ["LocalChannel"]


@final
class LocalChannel:
    """Copies payloads, so that a function's arguments are as independent of the caller's as on another worker."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._copies: dict[int, Buffer] = {}

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, None]:  # noqa: ARG002
        """Copies the bytes."""
        number = next(self._numbers)
        self._copies[number] = torch.frombuffer(data, dtype=torch.uint8).clone().numpy().data
        return agent_pb2.Payload(local=number), None

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer:  # noqa: ARG002
        """Returns the copy, and keeps it no longer."""
        return self._copies.pop(payload.local)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:  # noqa: ARG002
        """Drops the copy."""
        self._copies.pop(payload.local, None)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Returns whether the copy has not been received."""
        return payload.local in self._copies

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Drops the copy."""
        self.discard(peer, payload)

    def drop_peer(self, peer: int, reason: str) -> None:
        """Does nothing: a worker does not lose itself."""

    def drop_connection(self, peer: int, reason: str) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Drops all copies."""
        self._copies.clear()
