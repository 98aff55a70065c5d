"""The transport over gRPC: one bidirectional stream per pair of workers.

The worker that has something to send first opens the stream. If both open one at the same moment, the stream of
the worker with the lower id is used: the other worker's stream is answered with `duplicate`, and that worker
waits for its peer's.

All streams run on one event loop, so the number of threads does not grow with that of peers. Envelopes that are
sent while a write is in flight share the next frame; messages per second depend on that.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum, auto
from typing import Any, ClassVar, final

import grpc
from google.protobuf.message import DecodeError

from ...errors import LossCause
from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo
from ..contracts.worker_end import SHUT_DOWN, WorkerEnd
from ..wire.framing import bytes_field
from .base import TransportClosedError, TransportListener
from .handshake import Handshake, RefusedError
from .settings import CLIENT_OPTIONS, EXCHANGE_METHOD, aio

__all__ = ["GrpcStream", "GrpcStreams"]

FRAME_BYTES = 1 << 20
"""Maximum bytes of envelopes that share a frame; a larger envelope has a frame of its own."""

DIAL_ATTEMPTS = 3
"""Attempts to open a stream. A peer serves before its address is known, so a refused connection means that it is
gone; the further attempts are for a listen queue that overflows while many workers connect at once."""

DIAL_BACKOFF_S = 0.05
"""Seconds before the second attempt; doubled for each further one."""

DUPLICATE_TIMEOUT_S = 5.0
"""Seconds to wait for the stream that a peer said it is opening, before opening one again."""

log = logging.getLogger(__name__)

Read = Callable[[], Awaitable[Any]]
"""Reads a serialized frame; `aio.EOF` at the end."""

Write = Callable[[bytes], Awaitable[Any]]
"""Writes a serialized frame."""


class _State(Enum):
    IDLE = auto()
    DIALING = auto()
    AWAITING_PEER = auto()  # the peer is opening the stream that will be used
    OPEN = auto()
    CLOSED = auto()


@final
class GrpcStreams:
    """All streams of one agent. Used on the event loop only, except `add`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handshake: Handshake, listener: TransportListener) -> None:
        self.loop = loop
        self.handshake = handshake
        self.listener = listener
        self._streams: dict[int, GrpcStream] = {}

    def add(self, peer: WorkerInfo, address: str) -> "GrpcStream":
        """Makes the stream to a peer, before the peer is admitted. It is opened when it is first used.

        Args:
            peer: the worker at the other end.
            address: of the peer's server, host:port.
        """
        stream = self._streams[peer.id] = GrpcStream(self, peer, address)
        return stream

    def abort(self, peer: int, reason: str) -> None:
        """Ends the stream to a peer that cannot be used any more; see `GrpcStream.abort`."""
        self._streams[peer].abort(reason)

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: ARG002
        """Serves the Exchange method of the agent's gRPC service."""
        first = await context.read()
        if first is aio.EOF:
            return
        try:
            peer = await self.handshake.admit(agent_pb2.Frame.FromString(first).hello)
        except (DecodeError, RefusedError) as refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        stream = self._streams[peer.id]
        if stream.goodbye:
            await context.write(stream.goodbye)
            stream.on_goodbye_sent()
            return
        if stream.closed_reason is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, stream.closed_reason)
        accepted = stream.accept()
        welcome = agent_pb2.Frame(welcome=agent_pb2.Welcome(duplicate=not accepted)).SerializeToString()
        if accepted:
            await stream.run(context.read, context.write, first=welcome)
        else:
            await context.write(welcome)


@final
class GrpcStream:
    """The stream between this worker and one peer, whichever of the two opens it."""

    name: ClassVar[str] = "grpc"

    def __init__(self, streams: GrpcStreams, peer: WorkerInfo, address: str) -> None:
        self._streams = streams
        self._loop = streams.loop
        self._peer = peer
        self._address = address
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._queue: OrderedDict[int, bytes] = OrderedDict()
        self.closed_reason: str | None = None
        """The reason why the stream is closed; None until then."""
        # All attributes that follow are used on the loop only.
        self._state = _State.IDLE
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self.goodbye = b""
        """The serialized frame that ends the stream; empty until this worker leaves."""
        self._dialing: asyncio.Task[None] | None = None
        self._runner: asyncio.Task[Any] | None = None

    def send(self, envelope: bytes) -> int:
        """Queues an envelope."""
        with self._lock:
            if self.closed_reason is not None:
                raise TransportClosedError(self.closed_reason)
            ticket = next(self._tickets)
            self._queue[ticket] = bytes_field(agent_pb2.Frame.ENVELOPES_FIELD_NUMBER, len(envelope)) + envelope
            first = len(self._queue) == 1
        if first:
            self._loop.call_soon_threadsafe(self._start_or_wake)
        return ticket

    def withdraw(self, ticket: int) -> bool:
        """Removes an envelope from the queue, if it is there."""
        with self._lock:
            return self._queue.pop(ticket, None) is not None

    def connect(self) -> None:
        """Opens the stream if it is not open."""
        self._loop.call_soon_threadsafe(self._start_or_wake)

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        """Sends the queue and a goodbye, waits for the peer's goodbye, and ends the stream."""
        if self._state is _State.IDLE and dial:
            self._start_or_wake()
        self.goodbye = agent_pb2.Frame(goodbye=True, departure=end.to_proto()).SerializeToString()
        if self._state is _State.IDLE:
            self._finish(SHUT_DOWN, report=False)
            return
        self._wake.set()
        try:
            await asyncio.wait_for(self._ended.wait(), drain)
        except TimeoutError:
            self._finish(SHUT_DOWN, report=False)
        if self._dialing is not None:
            self._dialing.cancel()

    def abort(self, reason: str) -> None:
        """Ends a stream that works, because the peer cannot be used for another reason. Called on the loop."""
        self._finish(WorkerEnd(LossCause.DISCONNECTED, reason))
        if self._runner is not None:
            self._runner.cancel()

    def on_goodbye_sent(self) -> None:
        """Ends a stream that is awaited only to say goodbye. Called on the loop when the goodbye is sent."""
        if self._state is _State.AWAITING_PEER:
            self._finish(SHUT_DOWN, report=False)

    def accept(self) -> bool:
        """Decides whether the stream that the peer has opened is used. If so, the caller calls `run` with it.

        It is not used if there is a stream, or if this worker is opening one and has the lower id.
        """
        if self._state is _State.OPEN:
            return False
        if self._state is _State.DIALING and self._peer.id > self._streams.handshake.me.id:
            return False
        if self._dialing is not None:
            self._dialing.cancel()
            self._dialing = None
        self._state = _State.OPEN
        return True

    async def run(self, read: Read, write: Write, first: bytes = b"") -> None:
        """Exchanges frames until either side says goodbye or the connection breaks.

        Args:
            read: reads a frame of the peer.
            write: writes a frame.
            first: a frame to write before all others.
        """
        self._state = _State.OPEN
        self._runner = asyncio.current_task()
        writer = self._loop.create_task(self._write_frames(write, first))
        reason = "its connection closed without a goodbye; the process has died or was cut off"
        peer_end: WorkerEnd | None = None
        try:
            while (data := await read()) is not aio.EOF:
                frame = agent_pb2.Frame.FromString(data)
                for envelope in frame.envelopes:
                    self._streams.listener.on_envelope(self._peer, envelope)
                if frame.goodbye:
                    peer_end = WorkerEnd.from_proto(frame.departure)
                    break
            if self.goodbye:
                await writer
        except aio.AioRpcError as error:
            reason = f"its connection broke: {error.details()}"
        except DecodeError:
            reason = "it sent bytes that are no frame"
        except asyncio.CancelledError:
            pass  # gRPC cancels a handler whose peer has vanished
        except Exception as error:
            log.exception("the stream to worker %s failed", self._peer.name)
            reason = f"its connection broke: {error!r}"
        finally:
            writer.cancel()
            self._finish(SHUT_DOWN if self.goodbye else peer_end or WorkerEnd(LossCause.DISCONNECTED, reason))

    def _start_or_wake(self) -> None:
        if self._state is _State.IDLE and not self.goodbye:
            self._state = _State.DIALING
            self._dialing = self._loop.create_task(self._dial())
        else:
            self._wake.set()

    async def _dial(self) -> None:
        backoff = DIAL_BACKOFF_S
        for attempt in range(1, DIAL_ATTEMPTS + 1):
            try:
                if not await self._open():
                    self._wait_for_peer()
                return
            except aio.AioRpcError as error:
                unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
                if not unavailable or self.goodbye or attempt == DIAL_ATTEMPTS:
                    self._finish(_end_of(error, self._address))
                    return
            except Exception as error:
                self._finish(WorkerEnd(LossCause.UNREACHABLE, f"connecting to it failed: {error!r}"))
                return
            await asyncio.sleep(backoff)
            backoff *= 2

    async def _open(self) -> bool:
        """Opens a stream and runs it until it ends. Returns False if it is a duplicate."""
        async with aio.insecure_channel(self._address, options=CLIENT_OPTIONS) as channel:
            call = channel.stream_stream(EXCHANGE_METHOD)()
            try:
                hello = agent_pb2.Frame(hello=self._streams.handshake.hello)
                await _write(call, hello.SerializeToString())
                first = await call.read()
                if first is aio.EOF:
                    await _raise_status(call)
                welcome = agent_pb2.Frame.FromString(first)
                if welcome.goodbye:
                    self._finish(WorkerEnd.from_proto(welcome.departure))
                    return True
                if welcome.welcome.duplicate:
                    return False
                await self.run(call.read, lambda data: _write(call, data))
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await call.done_writing()
                return True
            finally:
                call.cancel()

    def _wait_for_peer(self) -> None:
        """Waits for the stream that the peer is opening; if none comes, opens one again."""
        self._state = _State.AWAITING_PEER

        def redial() -> None:
            if self._state is _State.AWAITING_PEER:
                self._state = _State.IDLE
                self._start_or_wake()

        self._loop.call_later(DUPLICATE_TIMEOUT_S, redial)

    async def _write_frames(self, write: Write, first: bytes) -> None:
        try:
            if first:
                await write(first)
            while True:
                if frame := self._next_frame():
                    await write(frame)
                elif self.goodbye:
                    await write(self.goodbye)
                    return
                else:
                    await self._wake.wait()
                    self._wake.clear()
        except (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError):
            pass  # `run` sees the same end while it reads, with the reason

    def _next_frame(self) -> bytes:
        """Takes envelopes of up to FRAME_BYTES, but at least one, from the queue; empty if there is none."""
        with self._lock:
            taken: list[bytes] = []
            size = 0
            for envelope in self._queue.values():
                size += len(envelope)
                if taken and size > FRAME_BYTES:
                    break
                taken.append(envelope)
            if len(taken) == len(self._queue):
                self._queue.clear()
            else:
                for _ in taken:
                    self._queue.popitem(last=False)
        return b"".join(taken)

    def _finish(self, end: WorkerEnd, *, report: bool = True) -> None:
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        with self._lock:
            self.closed_reason = end.reason
            self._queue.clear()
        self._ended.set()
        if report:
            self._streams.listener.on_closed(self._peer, end)


async def _write(call: Any, data: bytes) -> None:
    """Writes a frame; raises the status of a call that has ended, as reading does."""
    try:
        await call.write(data)
    except asyncio.InvalidStateError:
        await _raise_status(call)


async def _raise_status(call: Any) -> None:
    raise aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def _end_of(error: aio.AioRpcError, address: str) -> WorkerEnd:
    """Returns the end of a peer to which no stream can be opened."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return WorkerEnd(LossCause.UNREACHABLE, f"it cannot be reached at {address} ({error.details()})")
    return WorkerEnd(LossCause.REFUSED, f"it refused the connection: {error.details()}")
