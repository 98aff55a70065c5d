"""The transport over gRPC: one bidirectional stream per pair of workers.

The worker that has something to send first opens the stream. If both open one at the same moment, the stream of
the worker with the lower id is used: the other worker's stream is answered with `duplicate`, and that worker
waits for its peer's.

All streams run on one event loop, so the number of threads does not grow with that of peers. Envelopes that are
sent while a write is in flight share the next frame; messages per second depend on that.

Where they can, two workers connect a socket too, which carries the envelopes in a third of the time (sockets.py).
The stream then stands for the connection: goodbyes go by it, and it tells when a peer is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Protocol, final

import grpc
from google.protobuf.message import DecodeError

from ...errors import LossCause
from ...net.user_sockets import UNIX_SCHEME
from ...proto.v1 import agent_pb2
from ..contracts.worker import SHUT_DOWN, WorkerEnd
from ..execution.futures import Future
from ..execution.poller import SocketWaiter
from ..wire.parsing import parse_frame
from .base import Connecting, TransportClosedError, TransportListener
from .envelope_socket import CLOSED
from .grpc_endpoint import (
    DIAL_ATTEMPTS,
    DIAL_BACKOFF_S,
    EXCHANGE_METHOD,
    MAX_CONNECTION,
    RefusedError,
    address_of,
    aio,
    raise_status,
    write_frame,
)
from .liveness import process_at, process_runs
from .outbox import Outbox, StreamParts
from .sockets import OfferedSocket

__all__ = ["GrpcStream", "StreamPeer", "StreamState", "end_of_error", "serve_stream"]

BROKEN_SOCKET_GRACE_S = 0.1
"""Seconds that a stream may stand after its socket broke; if the peer has died, the stream tells how."""

ARRIVAL_TIMEOUT_S = 5.0
"""Seconds after its goodbye within which the payloads of a peer have to come: it had sent them before."""

DUPLICATE_TIMEOUT_S = 5.0
"""Seconds to wait for the stream that a peer said it is opening, before opening one again."""

OPENING_ROUND_TRIPS = 2
"""Round trips in which a stream is opened, at least: one for TCP, and one for the hello."""

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


log = logging.getLogger(__name__)


class StreamState(Enum):
    """What the stream between two workers is doing."""

    IDLE = auto()
    DIALING = auto()
    AWAITING_PEER = auto()  # the peer is opening the stream that will be used
    OPEN = auto()
    CLOSED = auto()


@final
class GrpcStream:
    """The stream between this worker and one peer, whichever of the two opens it. Watched by the heartbeats."""

    def __init__(self, parts: StreamParts, peer: TransportListener, address: str, number: int = 0) -> None:
        """Connects to nobody yet. The peer is told what comes by the stream, and of its end.

        Its address is host:port, or unix: and a path; the number is that of this stream among those of the two.
        """
        self._wake = asyncio.Event()
        self.outbox = Outbox(parts, peer, address, self._wake.set, self._on_socket_end)
        self._is_asleep = True
        """Whether the loop has to be woken for an envelope that is queued. Set on the loop only."""
        self._parts = parts
        self._loop = parts.loop
        self._peer = peer
        self._address = address
        self._worker = peer.info
        # All attributes that follow are used on the loop only.
        self._number = number
        """The greatest that either worker has counted to."""
        self._state = StreamState.IDLE
        self._ended = asyncio.Event()
        self.goodbye = b""
        """The serialized frame that ends the stream; empty until this worker leaves."""
        self._is_confirmed = False
        self._dialing: asyncio.Task[None] | None = None
        self._runner: asyncio.Task[Any] | None = None
        self._has_heard = self._has_sent = True
        """Whether something has come by the stream, and gone, since the heartbeats have looked."""
        self._is_busy = False
        """Whether something has been read that is not handled yet, and nothing more is read."""
        self._remote = ""
        """The address at the other end of the stream, if the peer has opened it."""

    def renewed(self) -> "GrpcStream":
        """Returns another stream in place of this one, which has ended. It is opened when it is first used."""
        return GrpcStream(self._parts, self._peer, self._address, self._number + 1)

    @property
    def name(self) -> str:
        """The carrier of the envelopes: "unix", "tcp" or "grpc"."""
        return "grpc" if self.outbox.socket is None else self.outbox.socket.name

    @property
    def queued_bytes(self) -> int:
        """Bytes of envelopes that are not on their way."""
        return self.outbox.queued_bytes

    def send(self, envelope: bytes, attached: Sequence[memoryview] = ()) -> None:
        """Sends an envelope, or queues it."""
        connection = self.outbox.socket or self.outbox.put(envelope, attached)
        if connection is None:
            if self._is_asleep:
                self._loop.call_soon_threadsafe(self._start_or_wake)
            return
        try:
            connection.writer.send(envelope, attached)
        except BrokenPipeError:
            raise TransportClosedError(self.outbox.closed_reason or CLOSED) from None

    def withdraw(self, beginning: bytes) -> bool:
        """Removes an envelope from the queue, if it is there."""
        return self.outbox.withdraw(beginning)

    def read_answer(self, future: Future[Any], waiter: SocketWaiter) -> None:
        """Has the calling thread read the socket, if there is one."""
        connection = self.outbox.socket
        if connection is not None and not connection.writer.is_broken:  # as it is in a forked child, too
            self._parts.executor.poller.read_here(connection, waiter, future)

    def connect(self) -> Connecting:
        """Opens the stream if it is not open."""
        self._loop.call_soon_threadsafe(self._start_or_wake)
        return self.outbox.connected

    def send_frame(self, frame: agent_pb2.Frame) -> None:
        """Sends a frame without envelopes. Called on the loop."""
        if not self.outbox.put_frame(frame.SerializeToString()):
            self.abort("it does not read the answers to what it asks for")
        self.connect()

    async def close(self, drain: float, end: WorkerEnd, *, dial: bool) -> None:
        """Sends the queue and a goodbye, waits for the peer's goodbye, and ends the stream."""
        if self._state is StreamState.IDLE and dial:
            self._start_or_wake()
        self.goodbye = agent_pb2.Frame(
            goodbye=True, departure=end.to_proto(), drained=not self._peer.queued_payload_bytes
        ).SerializeToString()
        # A peer that is suspect may never answer.
        is_awaited = self._state is StreamState.OPEN or (self._state is not StreamState.IDLE and not self._number)
        if is_awaited:
            self._wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), drain)
        self._finish(SHUT_DOWN, report=False)
        if self._dialing is not None:
            self._dialing.cancel()

    def abort(self, reason: str) -> None:
        """Ends the stream for good, because the peer cannot be used. Called on the loop."""
        self._cut(WorkerEnd(LossCause.DISCONNECTED, reason))

    def break_off(self, reason: str) -> None:
        """Ends the stream, after which the peer may be connected again. Called on the loop."""
        self._cut(WorkerEnd(LossCause.DISCONNECTED, reason), may_heal=True)

    def refuse(self, reason: str) -> None:
        """Lets the peer in no more, which is told this. Called on the loop."""
        self._cut(WorkerEnd(LossCause.REFUSED, reason), report=False)

    def _cut(self, end: WorkerEnd, *, report: bool = True, may_heal: bool = False) -> None:
        self._finish(end, report=report, may_heal=may_heal)
        for task in (self._runner, self._dialing):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    # The stream that the peer opens.

    def is_replaced_by(self, number: int) -> bool:
        """Returns whether the peer, which opens the stream of this number, says that this one is broken."""
        return self._state is StreamState.OPEN and number > self._number and not self.goodbye

    def on_goodbye_sent(self) -> None:
        """Ends a stream that is awaited only to say goodbye. Called on the loop when the goodbye is sent."""
        if self._state is StreamState.AWAITING_PEER:
            self._finish(SHUT_DOWN, report=False)

    def accept(self, number: int = 0) -> bool:
        """Returns whether the peer's stream is used: not if there is one, or this worker, of lower id, dials.

        The peer has counted to `number`.
        """
        is_opening = self._state is StreamState.DIALING and self._worker.wire_id > self._parts.handshake.me.wire_id
        if is_opening or self._state is StreamState.OPEN:
            return False
        if self._dialing is not None:
            self._dialing.cancel()
            self._dialing = None
        self._number = max(self._number, number)
        self._state = StreamState.OPEN
        return True

    async def welcome(self, read: Read, write: Write, remote: str) -> None:
        """Runs the stream that the peer has opened from an address, after offering it a socket."""
        self._remote = remote.partition(":")[2]
        self._runner = asyncio.current_task()
        offered = self.outbox.offer_socket()
        try:
            with contextlib.suppress(asyncio.CancelledError, aio.UsageError, asyncio.InvalidStateError):
                # Before anything is read: gRPC cannot end a stream during a write.
                await write(_welcome_frame(offered, number=self._number))
                if self._state is StreamState.OPEN:  # else it has been ended during the write
                    self._parts.heartbeats.add(self)
                    # Else its next frame tells: it may have opened the stream some time ago, and have died.
                    if not self._number:
                        self._on_opened()
                    await self._run(read, write)
        finally:
            # If it was closed before it was accepted, that tells nothing of the peer.
            self._dial_again(StreamState.OPEN)
            self.outbox.withdraw_offer()

    async def _run(self, read: Read, write: Write) -> None:
        """Exchanges frames until either side says goodbye or the connection breaks."""
        self._runner = asyncio.current_task()
        reason = CLOSED
        goodbye: agent_pb2.Frame | None = None
        may_heal = True
        writer = self._loop.create_task(self._write_frames(write))
        try:
            goodbye = await self._read_frames(read)
            if self.goodbye:
                await writer
        except aio.AioRpcError as error:
            reason = f"its connection broke: {error.details()}"
        except (DecodeError, ValueError) as error:
            reason, may_heal = f"it sent bytes that are no frame: {error}", False
            self._parts.handshake.audit.deny("agent", error, worker=self._worker.name)
        except (asyncio.CancelledError, aio.UsageError, asyncio.InvalidStateError):
            pass  # gRPC cancels a handler whose peer has vanished, and refuses its writes
        except Exception as error:
            log.exception("the stream to worker %s failed", self._worker.name)
            reason = f"its connection broke: {error!r}"
        finally:
            writer.cancel()
            try:
                await self.outbox.read_out(has_left=goodbye is not None)
                if goodbye is not None and goodbye.drained and not self.goodbye:
                    await self._wait_for_payloads(read)
            finally:  # gRPC may cancel this
                if self.goodbye:
                    self._finish(SHUT_DOWN)
                elif goodbye is not None:
                    self._finish(WorkerEnd.from_proto(goodbye.departure))
                else:
                    self._finish(WorkerEnd(LossCause.DISCONNECTED, reason), may_heal=may_heal)

    async def _wait_for_payloads(self, read: Read) -> None:
        """Waits for the payloads that a peer has sent before its goodbye; it keeps the stream open meanwhile."""
        self._parts.heartbeats.remove(self)  # a peer that leaves sends none
        complete = self._loop.create_task(self._peer.wait_for_payloads())
        await asyncio.sleep(0)
        if complete.done():
            return
        gone = asyncio.ensure_future(read())
        try:
            await asyncio.wait((complete, gone), timeout=ARRIVAL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            complete.cancel()
            gone.cancel()
            await asyncio.gather(complete, gone, return_exceptions=True)

    def _on_opened(self) -> None:
        if self._state is StreamState.OPEN and not self._is_confirmed:
            self._is_confirmed = True
            self._peer.on_opened()

    # What the heartbeats ask for: see Watched.

    def take_heard(self) -> bool:
        """Returns whether something has come since the last call, or might have if this worker had read it."""
        if self.outbox.socket is not None:
            return self.outbox.socket.take_heard()
        heard, self._has_heard = self._has_heard, False
        return heard or self._is_busy

    def take_sent(self) -> bool:
        """Returns whether something has been sent since the last call, or waits for the peer to read."""
        if self.outbox.socket is not None:
            return self.outbox.socket.take_sent()
        sent, self._has_sent = self._has_sent, False
        return sent or not self.outbox.is_empty

    def send_heartbeat(self) -> None:
        """Tells the peer that this worker is alive, unless the peer sees that."""
        if self.outbox.socket is not None:
            self.outbox.socket.send_heartbeat()
        elif self.outbox.put_frame(HEARTBEAT):
            self._wake.set()

    def on_silent(self, seconds: float) -> None:
        """Ends the stream of a peer that has been silent for so long."""
        self.break_off(f"nothing has come from it for {seconds:.1f} s")

    def sees_life(self, seconds: float) -> bool:
        """Returns whether the kernel shows that the peer's process runs, or did in the last seconds."""
        connection = self.outbox.socket
        if connection is not None and connection.process:
            return process_runs(connection.process)
        try:
            address = self._parts.handshake.endpoint.reach(self._address)
            if address.startswith(UNIX_SCHEME):
                return process_runs(process_at(address.removeprefix(UNIX_SCHEME)))
        except OSError:
            return False
        return self._parts.heartbeats.received.has_received(self._remote or address, seconds)

    async def _read_frames(self, read: Read) -> agent_pb2.Frame | None:
        """Handles the peer's frames, to the end of the stream; returns the last one if that is a goodbye."""
        while (data := await read()) is not aio.EOF:
            self._on_opened()
            self._has_heard = self._is_busy = True
            pause = None
            frame, nbytes = parse_frame(data)
            for envelope in frame.envelopes:
                # Of the memory that the frame takes, each has a part by its size.
                pause = self._peer.on_envelope(envelope, envelope.ByteSize() * nbytes // len(data)) or pause
            if pause is not None:
                await asyncio.wrap_future(pause)
            self._is_busy = False
            if frame.HasField("choice"):
                await self.outbox.on_choice(frame.choice.kind)
            self._peer.on_frame(frame)
            if frame.goodbye:
                return frame
        return None

    def _on_socket_end(self, reason: str, malformed: Exception | None) -> None:
        """Handles the end of the socket: the stream ends too, unless it tells soon how the peer has ended."""
        if self._state is StreamState.OPEN and not self.goodbye:
            end = self.break_off if malformed is None else self.abort
            self._loop.call_later(BROKEN_SOCKET_GRACE_S, end, reason)

    def _start_or_wake(self) -> None:
        self._is_asleep = False
        if self._state is StreamState.IDLE and not self.goodbye:
            self._state = StreamState.DIALING
            self._dialing = self._loop.create_task(self._dial())
        else:
            self._wake.set()

    async def _dial(self) -> None:
        backoff, attempts = DIAL_BACKOFF_S, 1 if self._number else DIAL_ATTEMPTS
        for attempt in range(1, attempts + 1):
            try:
                if not await self._open():  # the peer is opening the stream, or opens none
                    self._state = StreamState.AWAITING_PEER
                    self._loop.call_later(DUPLICATE_TIMEOUT_S, self._dial_again, StreamState.AWAITING_PEER)
                return
            except Exception as error:
                end = end_of_error(error, self._address)
                is_final = end.cause is LossCause.REFUSED or bool(self.goodbye)
                if is_final or attempt == attempts:
                    self._finish(end, may_heal=not is_final)
                    return
            await asyncio.sleep(backoff)
            backoff *= 2

    async def _open(self) -> bool:
        """Opens a stream and runs it until it ends. Returns False if it is a duplicate."""
        async with self._parts.handshake.endpoint.channel(self._worker.name, self._address) as channel:
            call = channel.stream_stream(EXCHANGE_METHOD)()
            choosing: asyncio.Task[None] | None = None
            try:
                began = self._loop.time()
                hello = agent_pb2.Frame(hello=self._parts.handshake.hello)
                hello.hello.connection = self._number
                await write_frame(call, hello.SerializeToString())
                first = await call.read()
                if first is aio.EOF:
                    await raise_status(call)
                welcome, _ = parse_frame(first)
                if welcome.goodbye:
                    self._finish(WorkerEnd.from_proto(welcome.departure))
                    return True
                if welcome.welcome.duplicate:
                    return False
                if welcome.welcome.connection > MAX_CONNECTION:
                    raise ValueError(f"it says that this is connection {welcome.welcome.connection}")
                self._number = max(self._number, welcome.welcome.connection)
                self._state = StreamState.OPEN  # whoever else says that he is the peer does not replace it
                self._parts.heartbeats.add(self)
                self._on_opened()
                if self._number:
                    await write_frame(call, HEARTBEAT)  # confirms that this worker lives
                if welcome.welcome.sockets:
                    round_trip = (self._loop.time() - began) / OPENING_ROUND_TRIPS
                    choosing = self.outbox.choose(welcome.welcome.sockets[0], round_trip)
                await self._run(call.read, lambda data: write_frame(call, data))
                with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await call.done_writing()
                return True
            finally:
                if choosing is not None:
                    choosing.cancel()
                call.cancel()

    def _dial_again(self, state: StreamState) -> None:
        """Opens the stream again if it is still in this state, unless this worker leaves."""
        if self._state is not state:
            return
        if self.goodbye:
            self._finish(SHUT_DOWN, report=False)
        else:
            self._state = StreamState.IDLE
            self._start_or_wake()

    async def _write_frames(self, write: Write) -> None:
        try:
            while True:
                if frame := self.outbox.next_frame():
                    await write(frame)
                    self._has_sent = True
                elif self.goodbye and not self.outbox.is_held:
                    if self.outbox.socket is not None:
                        self.outbox.socket.finish()
                    await write(self.goodbye)
                    return
                else:
                    self._is_asleep = True
                    if self.outbox.is_empty:  # looked at after the flag is set
                        await self._wake.wait()
                    self._is_asleep = False
                    self._wake.clear()
        except (aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError):
            pass  # `_run` sees the same end while it reads, with the reason

    def _finish(self, end: WorkerEnd, *, report: bool = True, may_heal: bool = False) -> None:
        if self._state is StreamState.CLOSED:
            return
        self._state = StreamState.CLOSED
        self._parts.heartbeats.remove(self)
        unsent = self.outbox.close(end.reason)
        self._ended.set()
        if report and may_heal:
            self._peer.on_broken(end, unsent)
        elif report:
            self._peer.on_closed(end, unsent)


class StreamPeer(TransportListener, Protocol):
    """A peer that may be connected by a stream."""

    stream: GrpcStream | None
    """None if it is let in no more."""

    end: WorkerEnd | None
    """Why it is not."""


async def serve_stream(
    parts: StreamParts,
    peers: Mapping[int, StreamPeer],
    requests: AsyncIterator[bytes],  # noqa: ARG001
    context: Any,
) -> None:
    """Serves the Exchange method of an agent's gRPC service.

    Args:
        parts: what the streams of the agent share.
        peers: its peers, by the id of their worker.
        requests: as gRPC gives it.
        context: the same.
    """
    try:
        worker, hello = await parts.handshake.receive(context)
    except RefusedError as refusal:
        await context.abort(refusal.code, str(refusal))
    peer = peers[worker.wire_id]
    if peer.stream is not None and peer.stream.is_replaced_by(hello.connection):
        peer.stream.break_off("it has connected again")
    stream, reason = peer.stream, peer.end.reason if peer.end is not None else None
    if stream is not None:
        reason = stream.outbox.closed_reason
        if stream.goodbye:
            await context.write(stream.goodbye)
            stream.on_goodbye_sent()
            return
    if stream is None or reason is not None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"it has given this worker up: {reason}")
        return
    if stream.accept(hello.connection):
        await stream.welcome(context.read, context.write, address_of(context))
    else:
        await context.write(_welcome_frame(duplicate=True))


def _welcome_frame(offered: OfferedSocket | None = None, *, number: int = 0, duplicate: bool = False) -> bytes:
    """Returns the serialized frame that answers a hello, on the stream of this number."""
    offers = [] if offered is None else [offered.offer]
    welcome = agent_pb2.Welcome(duplicate=duplicate, sockets=offers, connection=number)
    return bytes(agent_pb2.Frame(welcome=welcome).SerializeToString())


def end_of_error(error: Exception, address: str) -> WorkerEnd:
    """Returns the end of a peer to which no stream can be opened."""
    if isinstance(error, aio.AioRpcError):
        text = error.details()
        if error.code() not in BROKEN:
            return WorkerEnd(LossCause.REFUSED, f"it refused the connection: {text}")
    else:
        text = str(error) if isinstance(error, OSError) else repr(error)
    return WorkerEnd(LossCause.UNREACHABLE, f"it cannot be reached at {address} ({text})")
