"""Frames on gRPC's calls, and what their errors say of the peer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, final

import grpc

from ...errors import LossCause
from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerEnd
from ..execution.executor import Executor
from ..wire.parsing import parse_frame
from .base import TransportListener
from .envelope_socket import EnvelopeSocket
from .handshake import Handshake
from .liveness import Heartbeats
from .settings import aio
from .sockets import OfferedSocket, SocketListener

__all__ = [
    "HEARTBEAT",
    "Read",
    "StreamParts",
    "StreamState",
    "Write",
    "deliver",
    "end_of_error",
    "raise_status",
    "welcome_frame",
    "write_frame",
]


HEARTBEAT = agent_pb2.Frame(heartbeat=True).SerializeToString()

BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""What gRPC says of calls whose connection could not be made, or broke. A peer refuses with other statuses."""

Read = Callable[[], Awaitable[Any]]
"""Reads a serialized frame; `aio.EOF` at the end."""

Write = Callable[[bytes], Awaitable[Any]]
"""Writes a serialized frame."""


class StreamState(Enum):
    """What the stream between two workers is doing."""

    IDLE = auto()
    DIALING = auto()
    AWAITING_PEER = auto()  # the peer is opening the stream that will be used
    OPEN = auto()
    CLOSED = auto()


@final
@dataclass(frozen=True, slots=True)
class StreamParts:
    """What the streams of one agent share.

    loop: the event loop.
    handshake: makes and checks hellos.
    heartbeats: watches the connections.
    listener: offers and dials the sockets beside the streams.
    executor: its threads read these.
    allocate: returns memory of so many bytes for what follows envelopes. Raises MemoryError if there is none.
    unread: the sockets that have not been read to their end, of streams that have ended, too.
    """

    loop: asyncio.AbstractEventLoop
    handshake: Handshake
    heartbeats: Heartbeats
    listener: SocketListener
    executor: Executor
    allocate: Callable[[int], memoryview]
    unread: set[EnvelopeSocket] = field(default_factory=set)


async def deliver(listener: TransportListener, data: bytes) -> agent_pb2.Frame:
    """Parses a frame of a peer, hands it the envelopes, and returns the frame when more may be read.

    Raises DecodeError if the bytes are no frame, or it takes too much memory.
    """
    frame, nbytes = parse_frame(data)
    pause = None
    for envelope in frame.envelopes:
        # Of the memory that the frame takes, each has a part by its size.
        pause = listener.on_envelope(envelope, envelope.ByteSize() * nbytes // len(data)) or pause
    if pause is not None:
        await asyncio.wrap_future(pause)
    return frame


def welcome_frame(offered: OfferedSocket | None = None, *, number: int = 0, duplicate: bool = False) -> bytes:
    """Returns the serialized frame that answers a hello, on the stream of this number."""
    offers = [] if offered is None else [offered.offer]
    welcome = agent_pb2.Welcome(duplicate=duplicate, sockets=offers, connection=number)
    return bytes(agent_pb2.Frame(welcome=welcome).SerializeToString())


async def write_frame(call: Any, data: bytes) -> None:
    """Writes a frame; raises the status of a call that has ended, as reading does."""
    try:
        await call.write(data)
    except asyncio.InvalidStateError:
        await raise_status(call)


async def raise_status(call: Any) -> None:
    """Raises the status of a call that has ended."""
    raise aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def end_of_error(error: Exception, address: str) -> WorkerEnd:
    """Returns the end of a peer to which no stream can be opened."""
    if not isinstance(error, aio.AioRpcError):
        text = str(error) if isinstance(error, OSError) else repr(error)
        return WorkerEnd(LossCause.UNREACHABLE, f"it cannot be reached at {address} ({text})")
    if error.code() in BROKEN:
        return WorkerEnd(LossCause.UNREACHABLE, f"it cannot be reached at {address} ({error.details()})")
    return WorkerEnd(LossCause.REFUSED, f"it refused the connection: {error.details()}")
