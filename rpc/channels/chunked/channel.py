"""The channel for large payloads, which travel in chunks on gRPC streams of their own.

A worker opens one Transfer stream to each peer that it sends large payloads to, on another connection than that of
the envelopes, and sends one payload after the other. The receiver allocates memory for a payload when the envelope
tells its size; until then it does not read on, so that flow control stops the sender.
"""

import itertools
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, ClassVar, final

import grpc
from google.protobuf.message import DecodeError

from ....proto.v1 import agent_pb2
from ...transports.grpc_endpoint import Handshake, RefusedError
from ...wire.parsing import parse_chunks
from ..announced import MAX_ANNOUNCED
from ..base import Arriving, ChannelPeer, StartTransfer, check_size
from .receiving import ChunkReceiver
from .sending import ChunkParts, ChunkSender

__all__ = ["ChunkedChannel", "serve_chunks"]


@final
class ChunkedChannel:
    """Both ends of all transfers between this worker and one other."""

    name: ClassVar[str] = "chunked"

    def __init__(self, peer: ChannelPeer, parts: ChunkParts) -> None:
        self._peer = peer
        self._parts = parts
        self._numbers = itertools.count(1)
        self._starting: dict[int, int] = {}
        """The sizes of the payloads that are started and not queued yet, by transfer id."""
        self._sender: ChunkSender | None = None
        self._receiver: ChunkReceiver | None = None
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
        return payload, lambda: self._start(number, data)

    def receive(self, payload: agent_pb2.Payload) -> Arriving:
        """Allocates memory for the payload, and returns a future of it."""
        announced = payload.chunked
        check_size(announced.nbytes, self._parts.options)
        return self.receiver().expect(announced.transfer_id, announced.nbytes)

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Has the payload's chunks read and dropped, so that they do not block the payloads after them."""
        receiver = self.receiver()
        receiver.discard(payload.chunked.transfer_id, payload.chunked.nbytes)
        if receiver.expected > 2 * MAX_ANNOUNCED:
            self._peer.abort("it announces payloads that it does not send")

    def can_withdraw(self, payload: agent_pb2.Payload) -> bool:
        """Returns whether no chunk of the payload has been sent."""
        return self._sender is not None and self._sender.is_unsent(payload.chunked.transfer_id)

    def withdraw(self, payload: agent_pb2.Payload) -> None:
        """Removes the payload from the queue. Called right after `can_withdraw` returned True."""
        if self._sender is not None:
            self._sender.remove(payload.chunked.transfer_id)

    def drop(self, error: Exception) -> None:
        """Stops sending, and fails what is expected. What the stream of a lost peer still brings is dropped."""
        self.is_served = isinstance(error, ConnectionError)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.fail(error)
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.stop()

    def begin_to_serve(self) -> bool:
        """Returns whether a stream that the peer opens is served: one, and none of a lost peer."""
        is_served, self.is_served = self.is_served, True
        return not is_served and self._peer.end is None

    def receiver(self) -> ChunkReceiver:
        """Returns what receives the chunks of the peer."""
        if self._receiver is None:
            self._receiver = ChunkReceiver()
        return self._receiver

    def _start(self, number: int, data: memoryview) -> None:
        self._starting[number] = data.nbytes  # counted at once: a busy process runs the loop much later
        self._parts.loop.call_soon_threadsafe(self._enqueue, number, data)

    def _enqueue(self, number: int, data: memoryview) -> None:
        self._starting.pop(number, None)
        if self._peer.end is not None:
            return
        if self._sender is None:
            self._sender = ChunkSender(self._parts, self._peer.member, self._on_broken)
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
    receiver = channel.receiver()
    async for data in requests:
        try:
            message = parse_chunks(data)
        except DecodeError as error:
            deny(error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        for chunk in message.chunks:
            await receiver.add_chunk(chunk.transfer_id, chunk.data)
    return agent_pb2.TransferClosed().SerializeToString()
