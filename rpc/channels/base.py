"""What a channel is."""

import asyncio
from collections.abc import Callable
from typing import ClassVar, Protocol

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = ["Channel", "Start"]

Start = Callable[[], None]


class Channel(Protocol):
    """Moves payloads from this worker to others and the other way.

    `send` is called from any thread, everything else on the event loop.
    """

    name: ClassVar[str]
    """The field of Payload's `location` that this channel fills."""

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, Start | None]:
        """Says where these bytes will be for worker `peer`, and what sends them there.

        `start` is called once the envelope that names them is on its way, and not at all if that fails. It
        must not block on the peer; the memory must stay as it is until the peer has received it.
        """

    def receive(self, peer: int, payload: agent_pb2.Payload) -> "Buffer | asyncio.Future[Buffer]":
        """The bytes that `peer` has sent, or a future of them.

        Raises:
            ValueError: the payload contradicts itself or is larger than what is accepted.
        """

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """The bytes of this payload are not wanted: takes no more memory for them, and does not wait for them."""

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:
        """Has nothing yet been sent of these bytes, which this worker was to send to `peer`?"""

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Does not send these bytes, of which nothing has been sent."""

    def drop(self, peer: int, reason: str) -> None:
        """`peer` is gone: release what is kept for it."""

    async def close(self) -> None:
        """Releases everything."""
