"""The contract of channels, which carry payloads, and the bounds on what they use.

A message is sent as an *envelope*, a protobuf message with its headers, and *payloads*: the bytes of its pickled
body and of each of its tensors. A payload may travel inside the envelope or apart from it, by a channel.
"""

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

from ...errors import LimitReachedError
from ...proto.v1 import agent_pb2
from ..contracts.devices import DeviceBuffer
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions, RpcBackendOptions
from ..contracts.worker import Member, WorkerEnd
from ..execution.executor import Executor
from ..transports.base import Transport
from ..transports.grpc_endpoint import Handshake
from ..transports.sockets import BulkPeer, BulkSockets

__all__ = [
    "MAX_ANNOUNCED",
    "AnnouncedPayloads",
    "Arriving",
    "Channel",
    "ChannelDependencies",
    "ChannelPeer",
    "PayloadLostError",
    "SegmentLimit",
    "StartTransfer",
    "check_size",
]

MAX_ANNOUNCED = 1 << 20
"""Payloads that another worker may have announced and not sent."""

MAX_SUM_FACTOR = 4
"""Their bytes are those of the largest payload at most, times this."""

Arriving = concurrent.futures.Future[Buffer]
"""The bytes of a payload that has not arrived."""

StartTransfer = Callable[[Transport], None]
"""Starts to send a payload whose envelope is queued in a transport. Called at most once, from any thread, and must
not block."""


class PayloadLostError(ValueError):
    """The connection that carried a payload broke, while the worker that sent it is not lost.

    A ValueError, because the message is rejected as one whose payload is malformed.
    """


@final
@dataclass(frozen=True, slots=True)
class ChannelDependencies:
    """What the channels of one agent need from it.

    sockets: makes the connections for large payloads.
    handshake: lets workers open streams for payloads.
    open_channel: makes a gRPC channel to a worker, on a connection of its own.
    """

    loop: asyncio.AbstractEventLoop
    executor: Executor
    options: RpcBackendOptions
    sockets: BulkSockets
    handshake: Handshake
    open_channel: Callable[[Member], Any]


class ChannelPeer(BulkPeer, Protocol):
    """The worker at the other end of a channel. Its methods are called on the event loop."""

    member: Member

    end: WorkerEnd | None
    """How it ended, if it is lost."""

    transport: Transport
    """By which envelopes go to it: another one after each break, and when it is lost."""

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
      One that sends apart from the envelope returns a function, too, that starts the transfer. It is called with
      the transport in which the envelope is queued, because a payload whose envelope never arrives would block the
      payloads behind it, and never if that cannot be queued: no state is kept for a transfer that has not been
      started.
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


def check_size(nbytes: int, options: ChannelOptions) -> None:
    """Raises ValueError if a payload that a peer announces is empty, or larger than the options allow."""
    if not 0 < nbytes <= options.max_payload_bytes:
        raise ValueError(
            f"a payload of {nbytes} bytes is refused: max_payload_bytes is {options.max_payload_bytes}"
        )


@final
class AnnouncedPayloads:
    """Counts the payloads of one other worker that are to arrive. Safe to use from any thread."""

    def __init__(self, max_payload_bytes: int) -> None:
        self._max_bytes = MAX_SUM_FACTOR * max_payload_bytes
        self._lock = threading.Lock()
        self.count = 0
        """Those that have not arrived."""
        self.nbytes = 0
        """Their bytes."""

    def begin(self, count: int, nbytes: int) -> None:
        """Counts the payloads that an envelope announces. Raises LimitReachedError if that would be too much."""
        with self._lock:
            limit = ""
            if self.nbytes + nbytes > self._max_bytes:
                limit = f"max_payload_bytes*{MAX_SUM_FACTOR}={self._max_bytes}"
            elif self.count + count > MAX_ANNOUNCED:
                limit = f"MAX_ANNOUNCED={MAX_ANNOUNCED}"
            if limit:
                raise LimitReachedError(
                    f"payloads of {nbytes} bytes are refused: {self.count} of {self.nbytes} bytes are announced "
                    f"and have not arrived, of {MAX_ANNOUNCED} and {self._max_bytes} bytes ({MAX_SUM_FACTOR} "
                    "times max_payload_bytes) at most",
                    limit,
                )
            self.count += count
            self.nbytes += nbytes

    def end(self, count: int, nbytes: int) -> None:
        """Counts payloads that have arrived, or that will not."""
        with self._lock:
            self.count -= count
            self.nbytes -= nbytes


@final
class SegmentLimit:
    """Numbers and bounds the segments of one kind. Safe to use from any thread."""

    def __init__(self, max_bytes: int, max_segments: int, first_number: int = 1) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(first_number)
        self._max_bytes = max_bytes
        self._max_segments = max_segments
        self._count = 0
        self.used = 0
        """Bytes of all segments that have been made and not been released."""

    def acquire(self, nbytes: int) -> int | None:
        """Counts a segment of this size; returns its number, or None if that would be too much."""
        with self._lock:
            if self.used + nbytes > self._max_bytes or self._count >= self._max_segments:
                return None
            self.used += nbytes
            self._count += 1
            return next(self._numbers)

    def release(self, sizes: Sequence[int]) -> None:
        """Counts segments back that are released, or could not be made."""
        with self._lock:
            self.used -= sum(sizes)
            self._count -= len(sizes)
