"""Large payloads as chunks on gRPC streams of their own.

Each worker opens one Transfer stream to every peer it sends large payloads to, on a connection apart from
that of the envelopes, and sends one payload after the other. The receiver allocates a payload when its
envelope, which has come the other way, says how large it is, and lets the stream wait until then.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, final

import grpc
import torch

from ...proto.v1 import agent_pb2
from ..contracts.messages import Buffer
from ..contracts.options import ChannelOptions
from ..transports.handshake import Handshake, RefusedError
from ..transports.settings import CLIENT_OPTIONS, TRANSFER_METHOD, aio
from ..wire.framing import bytes_field
from .base import Start

__all__ = ["ChunkedChannel"]


@final
class ChunkedChannel:
    """The sending and the receiving ends of all transfers of one agent."""

    name: ClassVar[str] = "chunked"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handshake: Handshake,
        address_of: Callable[[int], str],
        options: ChannelOptions,
        broken: Callable[[int, str], None],
    ) -> None:
        """`broken(peer, reason)` is called when payloads can no longer be sent to a peer."""
        self._loop = loop
        self._handshake = handshake
        self._address_of = address_of
        self._options = options
        self._broken = broken
        self._numbers = itertools.count(1)
        self._outboxes: dict[int, _Outbox] = {}
        self._inboxes: dict[int, _Inbox] = {}

    def send(self, peer: int, data: memoryview) -> tuple[agent_pb2.Payload, Start]:
        """`start` queues the bytes, without a copy.

        Not earlier: a transfer whose envelope never comes would hold up all that follow.
        """
        number = next(self._numbers)
        payload = agent_pb2.Payload(chunked=agent_pb2.ChunkedPayload(transfer_id=number, nbytes=data.nbytes))
        return payload, lambda: self._start(peer, number, data)

    def receive(self, peer: int, payload: agent_pb2.Payload) -> "asyncio.Future[Buffer]":
        """A future of the assembled bytes."""
        announced = payload.chunked
        if not 0 < announced.nbytes <= self._options.max_payload_bytes:
            raise ValueError(
                f"a payload of {announced.nbytes} bytes is refused: "
                f"max_payload_bytes is {self._options.max_payload_bytes}"
            )
        return self._inbox(peer).announce(announced.transfer_id, announced.nbytes)

    def discard(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Lets the chunks pass: a stream that waited for them to be wanted would hold up all that follow."""
        self._inbox(peer).discard(payload.chunked.transfer_id, payload.chunked.nbytes)

    def can_withdraw(self, peer: int, payload: agent_pb2.Payload) -> bool:
        """Has no chunk of it been taken out of the outbox?"""
        outbox = self._outboxes.get(peer)
        return outbox is not None and outbox.holds_whole(payload.chunked.transfer_id)

    def withdraw(self, peer: int, payload: agent_pb2.Payload) -> None:
        """Takes it out of the outbox."""
        self._outboxes[peer].remove(payload.chunked.transfer_id)

    def drop(self, peer: int, reason: str) -> None:
        """Fails what is still expected from a peer and stops sending to it."""
        if inbox := self._inboxes.pop(peer, None):
            inbox.fail(reason)
        if outbox := self._outboxes.pop(peer, None):
            outbox.stop()

    async def close(self) -> None:
        """Stops all transfers."""
        for peer in {*self._inboxes, *self._outboxes}:
            self.drop(peer, "this worker shuts down")

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """The Transfer method of the agent's gRPC service."""
        peer: int | None = None
        async for data in requests:
            message = agent_pb2.Chunks.FromString(data)
            if peer is None:
                try:
                    peer = (await self._handshake.admit(message.hello)).id
                except RefusedError as refusal:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
            else:
                for chunk in message.chunks:
                    await self._inbox(peer).add(chunk.transfer_id, chunk.data)
        return agent_pb2.TransferClosed().SerializeToString()

    def _inbox(self, peer: int) -> "_Inbox":
        return self._inboxes.setdefault(peer, _Inbox(self._loop))

    def _start(self, peer: int, number: int, data: memoryview) -> None:
        self._loop.call_soon_threadsafe(self._enqueue, peer, number, data)

    def _enqueue(self, peer: int, number: int, data: memoryview) -> None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            hello = agent_pb2.Chunks(hello=self._handshake.hello).SerializeToString()
            outbox = _Outbox(self._loop, self._address_of(peer), hello, self._options.chunk_bytes)
            outbox.on_broken(lambda reason: self._outbox_broken(peer, reason))
            self._outboxes[peer] = outbox
        outbox.put(number, data)

    def _outbox_broken(self, peer: int, reason: str) -> None:
        self._outboxes.pop(peer, None)  # with the payloads that it still held
        self._broken(peer, reason)


class _Outbox:
    """What waits to be sent to one peer, and the task that sends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str, hello: bytes, chunk_bytes: int) -> None:
        self._queue: OrderedDict[int, memoryview] = OrderedDict()
        self._begun: int | None = None
        self._filled = asyncio.Event()
        self._address = address
        self._hello = hello
        self._chunk_bytes = chunk_bytes
        self._task = loop.create_task(self._run())

    def put(self, number: int, data: memoryview) -> None:
        self._queue[number] = data
        self._filled.set()

    def holds_whole(self, number: int) -> bool:
        return number in self._queue and number != self._begun

    def remove(self, number: int) -> None:
        del self._queue[number]

    def on_broken(self, tell: Callable[[str], None]) -> None:
        """Has `tell` be called with the reason when the stream ends although nobody stopped it."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                tell(f"its connection for large payloads broke: {task.exception()}")

        self._task.add_done_callback(ended)

    def stop(self) -> None:
        self._task.cancel()
        self._queue.clear()

    async def _run(self) -> None:
        options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(self._address, options=options) as channel:
            call = channel.stream_unary(TRANSFER_METHOD)()
            try:
                await call.write(self._hello)
                while True:
                    await self._filled.wait()
                    self._filled.clear()
                    while self._queue:
                        await call.write(b"".join(self._next_parts()))
            finally:
                call.cancel()

    def _next_parts(self) -> list[Buffer]:
        """The next chunk of what is first in the queue, and as many whole payloads after it as fit."""
        parts: list[Buffer] = []
        room = self._chunk_bytes
        while self._queue:
            number, data = next(iter(self._queue.items()))
            if parts and data.nbytes > room:
                break
            now, rest = data[:room], data[room:]
            if rest:
                self._queue[number] = rest
                self._begun = number
            else:
                del self._queue[number]
            header = agent_pb2.Chunk(transfer_id=number).SerializeToString()
            header += bytes_field(agent_pb2.Chunk.DATA_FIELD_NUMBER, len(now))
            parts += [bytes_field(agent_pb2.Chunks.CHUNKS_FIELD_NUMBER, len(header) + len(now)), header, now]
            room -= len(now)
        return parts


class _Inbox:
    """What one peer has announced and not yet fully sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._expected: dict[int, _Assembly | _Discarded] = {}
        self._announced = asyncio.Condition()
        self._failure: str | None = None

    def announce(self, number: int, nbytes: int) -> "asyncio.Future[Buffer]":
        if number in self._expected:
            raise ValueError(f"transfer {number} was announced twice")
        assembly = _Assembly(self._loop.create_future(), nbytes)
        self._expect(number, assembly)
        return assembly.done

    def discard(self, number: int, nbytes: int) -> None:
        known = self._expected.get(number)
        if known is not None:
            known.discard()
        else:
            self._expect(number, _Discarded(nbytes))

    def _expect(self, number: int, assembly: "_Assembly | _Discarded") -> None:
        self._expected[number] = assembly
        self._loop.create_task(self._wake())

    async def add(self, number: int, data: bytes) -> None:
        async with self._announced:
            await self._announced.wait_for(lambda: number in self._expected or self._failure is not None)
        assembly = self._expected.get(number)
        if assembly is None:
            return
        if assembly.add(data):
            del self._expected[number]

    def fail(self, reason: str) -> None:
        self._failure = reason
        for assembly in self._expected.values():
            assembly.fail(ConnectionError(reason))
        self._expected.clear()
        self._loop.create_task(self._wake())

    async def _wake(self) -> None:
        async with self._announced:
            self._announced.notify_all()


class _Assembly:
    """One payload on its way in."""

    def __init__(self, done: "asyncio.Future[Buffer]", nbytes: int) -> None:
        self.done = done
        self._bytes = torch.empty(nbytes, dtype=torch.uint8).numpy().data
        self._filled = 0

    def add(self, data: bytes) -> bool:
        """Adds the next chunk; is the payload complete?"""
        end = self._filled + len(data)
        if end > len(self._bytes):
            self.fail(ValueError(f"more than the announced {len(self._bytes)} bytes came"))
            return True
        if not self.done.cancelled():
            self._bytes[self._filled : end] = data
        self._filled = end
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


class _Discarded:
    """One payload that is let pass."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def add(self, data: bytes) -> bool:
        """Is it through?"""
        self._left -= len(data)
        return self._left <= 0

    def discard(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        pass
