"""The channel for large payloads, which travel in chunks on gRPC streams of their own.

A worker opens one Transfer stream to each peer that it sends large payloads to, on another connection than that of
the envelopes, and sends one payload after the other. The receiver allocates memory for a payload when the envelope
tells its size; until then it does not read on, so that flow control stops the sender.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, final

import grpc
import torch
from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..contracts.worker import Member
from ..transports.base import Connecting, Transport
from ..transports.grpc_endpoint import (
    DIAL_ATTEMPTS,
    DIAL_BACKOFF_S,
    TRANSFER_METHOD,
    Handshake,
    RefusedError,
    aio,
    raise_status,
    write_frame,
)
from ..wire.parsing import bytes_field, parse_chunks
from .base import MAX_ANNOUNCED, Arriving, ChannelDependencies, ChannelPeer, StartTransfer, check_size

__all__ = ["ChunkedChannel", "serve_chunks"]

MAX_CHUNKS = 1024
"""Chunks that share a message."""


@final
class ChunkedChannel:
    """Both ends of all transfers between this worker and one other."""

    name: ClassVar[str] = "chunked"

    def __init__(self, peer: ChannelPeer, dependencies: ChannelDependencies) -> None:
        self._peer = peer
        self._dependencies = dependencies
        self._numbers = itertools.count(1)
        self._starting: dict[int, int] = {}
        """The sizes of the payloads that are started and not queued yet, by transfer id."""
        self._sender: _ChunkSender | None = None
        self._has_broken = False
        """Whether there has been another connection before this one."""
        self.receiver = _ChunkReceiver()
        self.is_served = False
        """Whether no further stream is served: the peer has opened its stream, or is lost."""

    @property
    def queued_bytes(self) -> int:
        """The bytes that have not been given to gRPC. Read on any thread."""
        starting = sum(self._starting.copy().values())
        sender = self._sender
        return starting + (sender.queued_bytes if sender is not None else 0)

    def send(self, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer]:
        """Numbers the payload; starting the transfer queues the bytes without a copy."""
        number = next(self._numbers)
        payload = agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=number, nbytes=data.nbytes))
        return payload, lambda transport: self._start(number, data, transport)

    def receive(self, payload: agent_pb2.Payload, done: Arriving | None = None) -> Arriving:
        """Allocates memory for the payload, and returns a future of it: `done`, if that is given."""
        announced = payload.chunked
        check_size(announced.nbytes, self._dependencies.options.channels)
        return self.receiver.expect(announced.transfer_id, announced.nbytes, done or Arriving())

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Has the payload's chunks read and dropped, so that they do not block the payloads after them."""
        self.receiver.discard(payload.chunked.transfer_id, payload.chunked.nbytes)
        if self.receiver.expected > 2 * MAX_ANNOUNCED:
            self._peer.abort("it announces payloads that it does not send")

    def withdraw(self, payloads: Sequence[agent_pb2.Payload], withdraw_envelope: Callable[[], bool]) -> bool:
        """Withdraws the payloads outside an envelope with it, or nothing; returns whether.

        `withdraw_envelope` does so if nothing of the envelope has been sent, and returns whether. A payload
        without its envelope would hold up those after it.
        """
        sender, numbers = self._sender, [each.chunked.transfer_id for each in payloads]  # 0 in other channels
        if sender is None or not all(map(sender.is_unsent, numbers)) or not withdraw_envelope():
            return False
        for number in numbers:
            sender.remove(number)
        return True

    def drop(self, error: Exception) -> None:
        """Stops sending, and fails what is expected. What the stream of a lost peer still brings is dropped."""
        self.is_served = isinstance(error, ConnectionError)
        self._has_broken = True
        receiver, self.receiver = self.receiver, _ChunkReceiver()
        receiver.fail(error)
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.stop()

    def begin_to_serve(self) -> bool:
        """Returns whether a stream that the peer opens is served: one, and none of a lost peer."""
        is_served, self.is_served = self.is_served, True
        return not is_served and self._peer.end is None

    def _start(self, number: int, data: memoryview, transport: Transport) -> None:
        self._starting[number] = data.nbytes  # counted at once: a busy process runs the loop much later
        self._dependencies.loop.call_soon_threadsafe(self._enqueue, number, data, transport)

    def _enqueue(self, number: int, data: memoryview, transport: Transport) -> None:
        del self._starting[number]
        if transport is not self._peer.transport:
            return  # its envelope went by a connection that has ended: it would hold up all payloads behind it
        if self._sender is None:
            connected = transport.connect() if self._has_broken else None
            self._sender = _ChunkSender(self._dependencies, self._peer.member, connected, self._on_broken)
        self._sender.put(number, data)

    def _on_broken(self, reason: str) -> None:
        self._sender = None  # and the payloads in its queue
        self._peer.break_off(reason)


async def serve_chunks(
    handshake: Handshake,
    find: Callable[[int], ChunkedChannel],
    requests: AsyncIterator[bytes],
    context: Any,
) -> bytes:
    """Serves the agent's gRPC method Transfer. `find` returns the channel of a member, by its id."""
    try:
        worker, _ = await handshake.receive(context)
    except RefusedError as refusal:
        await context.abort(refusal.code, str(refusal))
    channel, deny = find(worker.wire_id), partial(handshake.audit.deny, "agent", worker=worker.name)
    if not channel.begin_to_serve():  # what it sends would be mixed with what the first stream sends
        deny("it has a stream for payloads already, or is lost")
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "this worker has such a stream already")
    receiver = channel.receiver
    async for data in requests:
        try:
            message = parse_chunks(data)
        except DecodeError as error:
            deny(error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for chunk in message.chunks:
            await receiver.add_chunk(chunk.transfer_id, chunk.data)
    return agent_pb2.TransferClosed().SerializeToString()


@final
class _ChunkSender:
    """The queue of payloads for one peer, and the task that sends them."""

    def __init__(
        self,
        dependencies: ChannelDependencies,
        to: Member,
        connected: Connecting | None,
        on_broken: Callable[[str], None],
    ) -> None:
        """Starts to open the stream, when the peers are connected if that is given.

        Else the peer might take it for a stream of the connection that broke, of which it has not noticed the end.
        `on_broken` takes the reason if the stream ends without `stop`.
        """
        self._queue: OrderedDict[int, memoryview] = OrderedDict()
        """What remains to be sent of each payload, by transfer id."""
        self.queued_bytes = 0
        """The bytes in the queue."""
        self._partly_sent: int | None = None
        """The id of the first transfer, if some of it has been sent."""
        self._wake = asyncio.Event()
        self._dependencies = dependencies
        self._to = to
        self._has_said_hello = False
        """Whether the stream is open; until then, it may be opened again."""
        self._on_broken = on_broken
        self._task = dependencies.loop.create_task(self._run(connected))
        self._task.add_done_callback(self._on_end)

    def put(self, number: int, data: memoryview) -> None:
        """Queues a payload."""
        self._queue[number] = data
        self.queued_bytes += data.nbytes
        self._wake.set()

    def is_unsent(self, number: int) -> bool:
        """Returns whether nothing of a payload has been sent."""
        return number in self._queue and number != self._partly_sent

    def remove(self, number: int) -> None:
        """Removes a payload from the queue."""
        self.queued_bytes -= self._queue.pop(number).nbytes

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._on_broken(f"its connection for large payloads broke: {task.exception()}")

    def stop(self) -> None:
        """Drops the queue, and ends the stream."""
        self._task.cancel()
        self._queue.clear()
        self.queued_bytes = 0

    async def _run(self, connected: Connecting | None) -> None:
        if connected is not None:
            await asyncio.shield(asyncio.wrap_future(connected))  # others wait for it, too
        pause = DIAL_BACKOFF_S
        for _ in range(DIAL_ATTEMPTS - 1):
            try:
                await self._send()
            except aio.AioRpcError as error:
                if self._has_said_hello or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(pause)
            pause *= 2
        await self._send()

    async def _send(self) -> None:
        """Opens the stream, and sends until that fails."""
        hello = agent_pb2.Chunks(hello=self._dependencies.handshake.hello).SerializeToString()
        async with self._dependencies.open_channel(self._to) as channel:
            call = channel.stream_unary(TRANSFER_METHOD)()
            call.add_done_callback(lambda _: self._wake.set())
            try:
                await write_frame(call, hello)
                self._has_said_hello = True
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    if call.done() and await call.code() is grpc.StatusCode.ALREADY_EXISTS:
                        await raise_status(call)  # what it was given before it was refused is lost
                    while self._queue:
                        await call.write(b"".join(self._next_chunks()))
            finally:
                call.cancel()

    def _next_chunks(self) -> list[Buffer]:
        """Takes up to `chunk_bytes` from the queue: part of the first payload, or as many whole payloads as fit.

        Returns the pieces of a serialized Chunks message.
        """
        pieces: list[Buffer] = []
        bytes_left = self._dependencies.options.channels.chunk_bytes
        while self._queue and len(pieces) < 3 * MAX_CHUNKS:
            number, data = next(iter(self._queue.items()))
            if pieces and data.nbytes > bytes_left:
                break
            now, rest = data[:bytes_left], data[bytes_left:]
            if rest:
                self._queue[number] = rest
                self._partly_sent = number
            else:
                del self._queue[number]
            header = agent_pb2.Chunk(transfer_id=number).SerializeToString()
            header += bytes_field(agent_pb2.Chunk.DATA_FIELD_NUMBER, len(now))
            pieces += [bytes_field(agent_pb2.Chunks.CHUNKS_FIELD_NUMBER, len(header) + len(now)), header, now]
            bytes_left -= len(now)
            self.queued_bytes -= len(now)
        return pieces


@final
class _ChunkReceiver:
    """The payloads that one peer has announced and not completely sent. Used on the event loop only."""

    def __init__(self) -> None:
        self._transfers: dict[int, _ExpectedPayload] = {}
        """By transfer id."""
        self._has_changed = asyncio.Event()
        """Set when a transfer is announced, and at the end."""
        self._has_failed = False

    @property
    def expected(self) -> int:
        """The number of payloads that have not been sent completely, those included that are not wanted."""
        return len(self._transfers)

    def expect(self, number: int, nbytes: int, done: Arriving) -> Arriving:
        """Allocates memory for a payload, and returns the future of it."""
        if number in self._transfers:
            raise ValueError(f"transfer {number} was announced twice")
        self._announce(number, _ExpectedPayload(done, nbytes, torch.empty(nbytes, dtype=torch.uint8).numpy().data))
        return done

    def discard(self, number: int, nbytes: int) -> None:
        """Drops a payload, before or after `expect`: its chunks are read and forgotten."""
        known = self._transfers.get(number)
        if known is not None:
            known.discard()
        else:
            self._announce(number, _ExpectedPayload(Arriving(), nbytes, None))

    async def add_chunk(self, number: int, data: bytes) -> None:
        """Adds the next chunk to a payload; waits until the payload is announced."""
        while number not in self._transfers and not self._has_failed:
            self._has_changed.clear()
            await self._has_changed.wait()
        payload = self._transfers.get(number)
        if payload is not None and payload.add(data):
            del self._transfers[number]

    def fail(self, error: Exception) -> None:
        """Fails all payloads, because the peer is lost or suspect."""
        self._has_failed = True
        for payload in self._transfers.values():
            payload.fail(error)
        self._transfers.clear()
        self._has_changed.set()

    def _announce(self, number: int, payload: "_ExpectedPayload") -> None:
        self._transfers[number] = payload
        self._has_changed.set()


@final
class _ExpectedPayload:
    """A payload whose chunks are copied into its memory, or dropped if it is not wanted."""

    def __init__(self, done: Arriving, nbytes: int, memory: memoryview | None) -> None:
        self.done = done
        self._nbytes = nbytes
        self._memory = memory
        self._received = 0

    def add(self, data: bytes) -> bool:
        """Adds the next chunk; returns whether the payload is complete or has failed."""
        begin, self._received = self._received, self._received + len(data)
        if self._received > self._nbytes:
            self.fail(ValueError(f"more than the announced {self._nbytes} bytes were sent"))
            return True
        is_complete = self._received == self._nbytes
        if self._memory is not None:
            self._memory[begin : self._received] = data
            if is_complete and not self.done.done():
                self.done.set_result(self._memory)
        return is_complete

    def discard(self) -> None:
        self._memory = None
        self.done.cancel()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
