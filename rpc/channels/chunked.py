"""The channel for large payloads, which travel in chunks on gRPC streams of their own.

A worker opens one Transfer stream to each peer that it sends large payloads to, on another connection than that of
the envelopes, and sends one payload after the other. The receiver allocates memory for a payload when the envelope
tells its size; until then it does not read on, so that flow control stops the sender.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, ClassVar, final

import grpc
import torch
from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from ..transports.grpc_calls import write_frame
from ..transports.handshake import Handshake, RefusedError
from ..transports.settings import DIAL_ATTEMPTS, DIAL_BACKOFF_S, TRANSFER_METHOD, aio
from ..wire.framing import bytes_field
from ..wire.parsing import parse_chunks
from .announced import MAX_ANNOUNCED
from .base import PayloadLostError, StartTransfer, check_size

__all__ = ["ChunkedChannel"]

MAX_CHUNKS = 1024
"""Chunks that share a message."""


@final
class ChunkedChannel:
    """Both ends of all transfers of one agent."""

    name: ClassVar[str] = "chunked"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handshake: Handshake,
        open_channel: Callable[[int], Any],
        options: ChannelOptions,
        on_broken: Callable[[int, str], None],
        on_disconnected: Callable[[int, str], None] | None = None,
    ) -> None:
        """Opens no stream yet.

        Args:
            loop: the agent's event loop.
            handshake: makes and checks the hellos of streams.
            open_channel: makes a gRPC channel to a worker, by its id, on a connection of its own.
            options: sizes of chunks and payloads.
            on_broken: called on the loop, with a peer and a reason, when the peer cannot be used any more.
            on_disconnected: called instead when a stream to a peer broke, or cannot be opened.
        """
        self._loop = loop
        self._handshake = handshake
        self._open_channel = open_channel
        self._options = options
        self._on_broken = on_broken
        self._on_disconnected = on_disconnected or on_broken
        self._numbers = itertools.count(1)
        self._starting: dict[int, tuple[int, int]] = {}
        """The receivers and sizes of the payloads that are started and not queued yet, by transfer id."""
        self._senders: dict[int, _TransferSender] = {}
        """By peer."""
        self._receivers: dict[int, _TransferReceiver] = {}
        """By peer."""
        self._served: set[int] = set()
        """The peers of which no further stream is served: they have opened theirs, or are lost."""

    def queued_bytes(self, peer: int) -> int:
        """Returns the bytes for a peer that have not been given to gRPC. Called on any thread."""
        starting = sum(nbytes for receiver, nbytes in self._starting.copy().values() if receiver == peer)
        sender = self._senders.get(peer)
        return starting + (sender.queued_bytes if sender is not None else 0)

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, StartTransfer]:
        """Numbers the payload; starting the transfer queues the bytes without a copy."""
        number = next(self._numbers)
        payload = agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=number, nbytes=data.nbytes))
        return payload, lambda: self._start(peer, number, data)

    def receive(self, peer: int, payload: agent_pb2.Payload) -> "asyncio.Future[Buffer]":
        """Allocates memory for the payload, and returns a future of it."""
        announced = payload.chunked
        check_size(announced.nbytes, self._options)
        return self._receiver(peer).expect(announced.transfer_id, announced.nbytes)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Has the payload's chunks read and dropped, so that they do not block the payloads after them."""
        receiver = self._receiver(peer)
        receiver.discard(payload.chunked.transfer_id, payload.chunked.nbytes)
        if receiver.expected > 2 * MAX_ANNOUNCED:
            self._on_broken(peer, "it announces payloads that it does not send")

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:
        """Returns whether no chunk of the payload has been sent."""
        sender = self._senders.get(peer)
        return sender is not None and sender.is_unsent(payload.chunked.transfer_id)

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Removes the payload from the peer's queue."""
        self._senders[peer].remove(payload.chunked.transfer_id)

    def drop_peer(self, peer: int, reason: str) -> None:
        """Stops sending to a peer, and fails what is expected from it. What its stream still brings is dropped."""
        self._served.add(peer)
        self._drop(peer, ConnectionError(reason))

    def drop_connection(self, peer: int, reason: str) -> None:
        """Does the same for a peer that may come back, and open another stream."""
        self._drop(peer, PayloadLostError(reason))
        self._served.discard(peer)

    def _drop(self, peer: int, error: Exception) -> None:
        if receiver := self._receivers.pop(peer, None):
            receiver.fail(error)
        if sender := self._senders.pop(peer, None):
            sender.stop()

    async def close(self) -> None:
        """Stops all transfers."""
        for peer in {*self._receivers, *self._senders}:
            self._drop(peer, ConnectionError("this worker shuts down"))

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Serves the Transfer method of the agent's gRPC service."""
        try:
            worker = await self._handshake.receive(context)
        except RefusedError as refusal:
            await context.abort(refusal.code, str(refusal))
        peer, deny = worker.wire_id, partial(self._handshake.audit.deny, "agent", worker=worker.name)
        if peer in self._served:  # what it sends would be mixed with what the first stream sends
            deny("it has a stream for payloads already, or is lost")
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "this worker has such a stream already")
        self._served.add(peer)
        receiver = self._receiver(peer)
        async for data in requests:
            try:
                message = parse_chunks(data)
            except DecodeError as error:
                deny(error)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            for chunk in message.chunks:
                await receiver.add_chunk(chunk.transfer_id, chunk.data)
        return agent_pb2.TransferClosed().SerializeToString()

    def _receiver(self, peer: int) -> "_TransferReceiver":
        return self._receivers.setdefault(peer, _TransferReceiver(self._loop))

    def _start(self, peer: int, number: int, data: memoryview) -> None:
        self._starting[number] = peer, data.nbytes  # counted at once: a busy process runs the loop much later
        try:
            self._loop.call_soon_threadsafe(self._enqueue, peer, number, data)
        except BaseException:
            self._starting.pop(number, None)
            raise

    def _enqueue(self, peer: int, number: int, data: memoryview) -> None:
        self._starting.pop(number, None)
        sender = self._senders.get(peer)
        if sender is None:
            hello = agent_pb2.Chunks(hello=self._handshake.hello).SerializeToString()
            sender = _TransferSender(
                self._loop, partial(self._open_channel, peer), hello, self._options.chunk_bytes
            )
            sender.when_broken(lambda reason: self._handle_broken_sender(peer, reason))
            self._senders[peer] = sender
        sender.put(number, data)

    def _handle_broken_sender(self, peer: int, reason: str) -> None:
        self._senders.pop(peer, None)  # and the payloads in its queue
        self._on_disconnected(peer, reason)


@final
class _TransferSender:
    """The queue of payloads for one peer, and the task that sends them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, open_channel: Callable[[], Any], hello: bytes, chunk_bytes: int
    ) -> None:
        self._queue: OrderedDict[int, memoryview] = OrderedDict()
        """What remains to be sent of each payload, by transfer id."""
        self.queued_bytes = 0
        """The bytes in the queue."""
        self._partly_sent: int | None = None
        """The id of the first transfer, if some of it has been sent."""
        self._wake = asyncio.Event()
        self._open_channel = open_channel
        self._hello = hello
        self._has_said_hello = False
        """Whether the stream is open; until then, it may be opened again."""
        self._chunk_bytes = chunk_bytes
        self._task = loop.create_task(self._run())

    def put(self, number: int, data: memoryview) -> None:
        self._queue[number] = data
        self.queued_bytes += data.nbytes
        self._wake.set()

    def is_unsent(self, number: int) -> bool:
        return number in self._queue and number != self._partly_sent

    def remove(self, number: int) -> None:
        self.queued_bytes -= self._queue.pop(number).nbytes

    def when_broken(self, callback: Callable[[str], None]) -> None:
        """Has `callback` called with the reason if the stream ends without `stop`."""

        def on_done(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                callback(f"its connection for large payloads broke: {task.exception()}")

        self._task.add_done_callback(on_done)

    def stop(self) -> None:
        self._task.cancel()
        self._queue.clear()
        self.queued_bytes = 0

    async def _run(self) -> None:
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
        async with self._open_channel() as channel:
            call = channel.stream_unary(TRANSFER_METHOD)()
            try:
                await write_frame(call, self._hello)
                self._has_said_hello = True
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    while self._queue:
                        await call.write(b"".join(self._next_chunks()))
            finally:
                call.cancel()

    def _next_chunks(self) -> list[Buffer]:
        """Takes up to `chunk_bytes` from the queue: part of the first payload, or as many whole payloads as fit.

        Returns:
            The pieces of a serialized Chunks message.
        """
        pieces: list[Buffer] = []
        bytes_left = self._chunk_bytes
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
class _TransferReceiver:
    """The payloads that one peer has announced and not completely sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transfers: dict[int, _IncomingPayload | _DiscardedPayload] = {}
        """By transfer id."""
        self._announced = asyncio.Condition()
        """Notified when a transfer is announced, and at the end."""
        self._has_failed = False

    @property
    def expected(self) -> int:
        """The number of payloads that have not been sent completely, those included that are not wanted."""
        return len(self._transfers)

    def expect(self, number: int, nbytes: int) -> "asyncio.Future[Buffer]":
        """Allocates memory for a payload, and returns a future of it."""
        if number in self._transfers:
            raise ValueError(f"transfer {number} was announced twice")
        payload = _IncomingPayload(self._loop.create_future(), nbytes)
        self._announce(number, payload)
        return payload.done

    def discard(self, number: int, nbytes: int) -> None:
        known = self._transfers.get(number)
        if known is not None:
            known.discard()
        else:
            self._announce(number, _DiscardedPayload(nbytes))

    async def add_chunk(self, number: int, data: bytes) -> None:
        """Adds the next chunk to a payload; waits until the payload is announced."""
        async with self._announced:
            await self._announced.wait_for(lambda: number in self._transfers or self._has_failed)
        payload = self._transfers.get(number)
        if payload is not None and payload.add(data):
            del self._transfers[number]

    def fail(self, error: Exception) -> None:
        """Fails all payloads, because the peer is lost or suspect."""
        self._has_failed = True
        for payload in self._transfers.values():
            payload.fail(error)
        self._transfers.clear()
        self._loop.create_task(self._notify())

    def _announce(self, number: int, payload: "_IncomingPayload | _DiscardedPayload") -> None:
        self._transfers[number] = payload
        self._loop.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._announced:
            self._announced.notify_all()


@final
class _IncomingPayload:
    """A payload whose chunks are copied into its memory."""

    def __init__(self, done: "asyncio.Future[Buffer]", nbytes: int) -> None:
        self.done = done
        self._bytes = torch.empty(nbytes, dtype=torch.uint8).numpy().data
        self._received = 0

    def add(self, data: bytes) -> bool:
        """Adds the next chunk; returns whether the payload is complete or has failed."""
        end = self._received + len(data)
        if end > len(self._bytes):
            self.fail(ValueError(f"more than the announced {len(self._bytes)} bytes were sent"))
            return True
        if not self.done.cancelled():
            self._bytes[self._received : end] = data
        self._received = end
        if end < len(self._bytes):
            return False
        if not self.done.done():
            self.done.set_result(self._bytes)
        return True

    def discard(self) -> None:
        self.done.cancel()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@final
class _DiscardedPayload:
    """A payload whose chunks are dropped."""

    def __init__(self, nbytes: int) -> None:
        self._bytes_left = nbytes

    def add(self, data: bytes) -> bool:
        """Counts the next chunk; returns whether it was the last one."""
        self._bytes_left -= len(data)
        return self._bytes_left <= 0

    def discard(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass
