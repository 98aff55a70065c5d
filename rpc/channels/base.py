"""The contract of channels, which carry payloads: the bytes of a message's body, or of one of its tensors."""

import asyncio
from collections.abc import Callable
from typing import ClassVar, Protocol

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer

__all__ = ["Channel", "StartTransfer"]

StartTransfer = Callable[[], None]
"""Starts to send a payload. Called once from any thread, and must not block."""


class Channel(Protocol):
    """Carries payloads between this worker and all of its peers, which are given by their ids.

    The sender's channel describes each payload by a `Payload` message, which travels in the envelope. By it the
    receiver's channel of the same name finds the bytes, which may arrive before or after the envelope.

    - Order: payloads may arrive in any order. A payload whose envelope never arrives would delay those behind it,
      so a channel sends it only once the envelope is queued. The receiving agent calls `receive` or `discard` for
      each payload.
    - Threads: `send` and the function that it returns are called from any thread, all else on the agent's event
      loop. Nothing blocks on a peer.
    - Memory: a channel need not copy the bytes that it sends, only keep the memoryview until they are sent; users
      leave a tensor unchanged until its call is done. A received buffer belongs to the tensor made from it, which
      may be written to, so nothing else may use it (`bytes` are copied first).
    - Ownership: the agent's Network makes its channels, and calls `close` once. Connections and threads belong to
      the channel.
    """

    name: ClassVar[str]
    """The field of Payload's `location` that this channel sets."""

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer | None]:
        """Prepares to send a payload.

        Args:
            peer: the receiver.
            data: the bytes, contiguous.

        Returns:
            The description for the envelope, and a function that starts the transfer; None in its place if nothing
            remains to be sent. The function is called once the envelope is queued, and never if that fails: a
            channel keeps nothing for a transfer that has not been started.
        """

    def receive(self, peer: int, payload: agent_pb2.Payload) -> "Buffer | asyncio.Future[Buffer]":
        """Returns the bytes of a payload, or a future of them, which fails if they cannot arrive.

        The future raises ValueError for malformed transfers, ConnectionError if the peer is lost.

        Args:
            peer: the sender.
            payload: the description, which is not trusted: no memory is allocated beyond
                `ChannelOptions.max_payload_bytes`.

        Raises:
            ValueError: the description contradicts itself, or announces more than is accepted.
        """

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Drops a payload that is not wanted, before or after it arrives, without memory for it.

        Called in place of `receive`, or after it, whether it raised or not; its future is then cancelled.
        """

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:
        """Returns whether a payload that this worker sends is still complete in the channel's queue."""

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Removes a payload from the channel's queue. Called right after `can_withdraw` returned True."""

    def drop_peer(self, peer: int, reason: str) -> None:
        """Releases all that is queued for a lost peer, and fails what is expected from it with ConnectionError.

        Args:
            peer: the lost worker.
            reason: for errors, as in WorkerEnd.
        """

    async def close(self) -> None:
        """Does what `drop_peer` does for all peers, and releases connections and threads."""
