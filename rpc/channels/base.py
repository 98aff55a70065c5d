"""The contract of channels, which carry payloads.

A message is sent as an *envelope*, a protobuf message with its headers, and *payloads*: the bytes of its pickled
body and of each of its tensors. A payload may travel inside the envelope or apart from it, by a channel.
"""

import concurrent.futures
from collections.abc import Callable
from typing import ClassVar, Protocol

from ...proto.v1 import agent_pb2
from ..contracts.devices import DeviceBuffer
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from ..contracts.worker import Member, WorkerEnd
from ..transports.sockets import BulkPeer

__all__ = ["Arriving", "Channel", "ChannelPeer", "PayloadLostError", "StartTransfer", "check_size"]

Arriving = concurrent.futures.Future[Buffer]
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


class ChannelPeer(BulkPeer, Protocol):
    """The worker at the other end of a channel. Its methods are called on the event loop."""

    member: Member

    end: WorkerEnd | None
    """How it ended, if it is lost."""

    @property
    def is_me(self) -> bool:
        """Whether it is this worker itself."""

    @property
    def has_socket(self) -> bool:
        """Whether its envelopes travel by a socket beside the gRPC stream."""

    def break_off(self, reason: str) -> None:
        """Ends the connection to it, after which there may be another one."""

    def abort(self, reason: str) -> None:
        """Ends the connection to it for good, because it cannot be used."""


class Channel(Protocol):
    """Carries payloads between this worker and one peer.

    The sender's channel describes each payload in a protobuf `Payload`, which travels in the envelope. The
    receiver's channel of the same name uses this description to find the bytes, which may arrive before or after
    the envelope.

    - Sending: a channel has a `send`, which takes bytes, contiguous, and returns the description of the payload.
      One that sends apart from the envelope returns a function, too, that starts the transfer. It is called once
      the envelope is queued, because a payload whose envelope never arrives would block the payloads behind it,
      and never if that cannot be queued: no state is kept for a transfer that has not been started.
    - Order: payloads may arrive in any order. The receiving agent calls `receive` or `discard` for each payload.
    - Threads: `send` and the function that it returns are called from any thread, all other methods on the agent's
      event loop unless they say otherwise. No method blocks on a peer.
    - Memory: a channel need not copy the bytes that it sends, but keeps the memoryview until they are sent; users
      leave a tensor unchanged until the call with it is done. A received memoryview becomes the memory of a
      tensor, which may be written to, so the channel must not use it afterwards. Received `bytes` are copied.
    - Ownership: a Peer has its channels, and drops them when its connection breaks and when it is lost. Each
      channel owns its connections and threads.
    """

    name: ClassVar[str]
    """The name of the channel: the field of the oneof `location` in `Payload` that it sets."""

    def receive(self, payload: agent_pb2.Payload) -> Buffer | DeviceBuffer | Arriving:
        """Returns the bytes of a payload, or a future of them if they have not arrived.

        The future fails with ValueError if the transfer is malformed or breaks, and with ConnectionError if the
        peer is lost.

        Args:
            payload: the description. It is not trusted: a channel allocates at most
                `ChannelOptions.max_payload_bytes` for it.

        Raises:
            ValueError: the description is malformed, or announces more than `max_payload_bytes`.
            RuntimeError: there is no memory for the payload.
        """

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Drops a payload that is not wanted, before or after its bytes arrive.

        Called instead of `receive`, or after `receive` has returned or raised. Cancels the future that `receive`
        has returned. Allocates no memory for the payload.
        """

    def drop(self, error: ConnectionError | PayloadLostError) -> None:
        """Drops what is queued for the peer; fails the futures of payloads from it.

        Args:
            error: what they fail with: a ConnectionError if the peer is lost, and a PayloadLostError if its
                connection broke, but the peer may come back, and has another one then.
        """
