"""Payloads of calls from a worker to itself."""

import itertools
from typing import ClassVar, final

import torch

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = ["LocalChannel"]


@final
class LocalChannel:
    """Copies, so that arguments are as independent of the caller's as on any other worker."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: dict[int, Buffer] = {}

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, None]:  # noqa: ARG002
        """Keeps a copy of the bytes."""
        number = next(self._numbers)
        self._kept[number] = torch.frombuffer(data, dtype=torch.uint8).clone().numpy().data
        return agent_pb2.Payload(local=number), None

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer:  # noqa: ARG002
        """Hands the copy over."""
        return self._kept.pop(payload.local)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:  # noqa: ARG002
        """Forgets the copy."""
        self._kept.pop(payload.local, None)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:  # noqa: ARG002
        """Is the copy still here?"""
        return payload.local in self._kept

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Forgets the copy."""
        self.discard(peer, payload)

    def drop(self, peer: int, reason: str) -> None:
        """A worker does not lose itself."""

    async def close(self) -> None:
        """Forgets what nobody asked for."""
        self._kept.clear()
