"""The contract of channels, which carry payloads.

A message is sent as an *envelope*, a protobuf message with its headers, and *payloads*: the bytes of its pickled
body and of each of its tensors. A payload may travel inside the envelope or apart from it, as its channel decides.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import ClassVar, Protocol

from ...proto.v1 import agent_pb2
from ..contracts.device_payloads import DeviceBuffer
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions

__all__ = ["Arriving", "Channel", "PayloadLostError", "SendingChannel", "StartTransfer", "check_size"]

Arriving = asyncio.Future[Buffer] | concurrent.futures.Future[Buffer]
"""The bytes of a payload that has not arrived."""

StartTransfer = Callable[[], None]
"""Starts to send a payload. Called at most once, from any thread, and must not block."""


class PayloadLostError(ValueError):
    """The connection that carried a payload broke, while the worker that sent it is not lost.

    A ValueError, because the message is rejected as one whose payload is malformed.
    """


def check_size(nbytes: int, options: ChannelOptions) -> None:
    """Raises ValueError if a payload that a peer announces is empty, or larger than the options allow."""
    if not 0 < nbytes <= options.max_payload_bytes:
        raise ValueError(
            f"a payload of {nbytes} bytes is refused: max_payload_bytes is {options.max_payload_bytes}"
        )


class Channel(Protocol):
    """Carries payloads between this worker and all of its peers. `peer` is always the id of a worker.

    The sender's channel describes each payload in a protobuf `Payload`, which travels in the envelope. The
    receiver's channel of the same name uses this description to find the bytes, which may arrive before or after
    the envelope.

    - Order: payloads may arrive in any order. A channel sends a payload only once its envelope is queued, because
      a payload whose envelope never arrives would block the payloads behind it. The receiving agent calls
      `receive` or `discard` for each payload.
    - Threads: `send` and the function that it returns are called from any thread; all other methods are called on
      the agent's event loop. No method blocks on a peer.
    - Memory: a channel need not copy the bytes that it sends, but keeps the memoryview until they are sent; users
      leave a tensor unchanged until the call with it is done. A received memoryview becomes the memory of a
      tensor, which may be written to, so the channel must not use it afterwards. Received `bytes` are copied.
    - Ownership: the agent's Network makes its channels, and calls `close` once. Each channel owns its connections
      and threads.
    """

    name: ClassVar[str]
    """The name of the channel: the field of the oneof `location` in `Payload` that it sets."""

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer | Arriving:
        """Returns the bytes of a payload, or a future of them if they have not arrived.

        The future fails with ValueError if the transfer is malformed or breaks, and with ConnectionError if the
        peer is lost.

        Args:
            peer: the sender.
            payload: the description. It is not trusted: a channel allocates at most
                `ChannelOptions.max_payload_bytes` for it.

        Raises:
            ValueError: the description is malformed, or announces more than `max_payload_bytes`.
            RuntimeError: there is no memory for the payload.
        """

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Drops a payload that is not wanted, before or after its bytes arrive.

        Called instead of `receive`, or after `receive` has returned or raised. Cancels the future that `receive`
        has returned. Allocates no memory for the payload.

        Args:
            peer: the sender.
            payload: the description.
        """

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:
        """Returns whether a payload can be withdrawn, because the channel has sent none of its bytes."""

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Removes a payload from the channel's queue. Called right after `can_withdraw` returned True."""

    def drop_peer(self, peer: int, reason: str) -> None:
        """Drops the payloads queued for a lost peer; fails the futures of payloads from it with ConnectionError.

        Args:
            peer: the lost worker.
            reason: how the peer ended, for the text of the errors: see `WorkerEnd.reason`.
        """

    def drop_connection(self, peer: int, reason: str) -> None:
        """Drops the same for a peer whose connection broke, but which may come back: it has another one then.

        The futures fail with PayloadLostError.

        Args:
            peer: the worker.
            reason: how the connection broke.
        """

    async def close(self) -> None:
        """Drops all payloads as `drop_peer` does for one peer, and releases connections and threads."""


class SendingChannel(Channel, Protocol):
    """A channel that takes any payload."""

    def receive(self, peer: int, payload: agent_pb2.Payload) -> Buffer | Arriving:
        """Returns the bytes of a payload, in the memory of the host, or a future of them."""

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer | None]:
        """Prepares to send a payload.

        Args:
            peer: the receiver.
            data: the bytes, contiguous.

        Returns:
            The payload's description for the envelope, and a function that starts the transfer, or None if nothing
            remains to be sent. The function is called once the envelope is queued, and never if the envelope
            cannot be queued, so a channel must keep no state for a transfer that has not been started.
        """
