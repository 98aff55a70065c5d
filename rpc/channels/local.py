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

    def send(self, data: memoryview) -> agent_pb2.Payload:
        """Copies the bytes."""
        number = next(self._numbers)
        self._copies[number] = torch.frombuffer(data, dtype=torch.uint8).clone().numpy().data
        return agent_pb2.Payload(local=number)

    def receive(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the copy, and keeps it no longer."""
        return self._copies.pop(payload.local)

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Drops the copy."""
        self._copies.pop(payload.local, None)

    def drop(self, error: Exception) -> None:  # noqa: ARG002
        """Drops all copies."""
        self._copies.clear()
