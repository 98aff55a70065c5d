"""The sending end of chunks: the payloads for one peer, one after the other."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import grpc

from ....proto.v1 import agent_pb2
from ...contracts.messages import Buffer
from ...contracts.options import ChannelOptions
from ...contracts.worker import Member
from ...transports.grpc_endpoint import DIAL_ATTEMPTS, DIAL_BACKOFF_S, TRANSFER_METHOD, Handshake, aio, write_frame
from ...wire.parsing import bytes_field

__all__ = ["ChunkParts", "ChunkSender"]

MAX_CHUNKS = 1024
"""Chunks that share a message."""


@final
@dataclass(frozen=True, slots=True)
class ChunkParts:
    """What the streams of chunks of one agent share."""

    loop: asyncio.AbstractEventLoop
    handshake: Handshake
    open_channel: Callable[[Member], Any]
    """Makes a gRPC channel to a worker, on a connection of its own."""
    options: ChannelOptions


@final
class ChunkSender:
    """The queue of payloads for one peer, and the task that sends them."""

    def __init__(self, parts: ChunkParts, to: Member, on_broken: Callable[[str], None]) -> None:
        """Starts to open the stream. `on_broken` takes the reason if that ends without `stop`."""
        self._queue: OrderedDict[int, memoryview] = OrderedDict()
        """What remains to be sent of each payload, by transfer id."""
        self.queued_bytes = 0
        """The bytes in the queue."""
        self._partly_sent: int | None = None
        """The id of the first transfer, if some of it has been sent."""
        self._wake = asyncio.Event()
        self._parts = parts
        self._to = to
        self._has_said_hello = False
        """Whether the stream is open; until then, it may be opened again."""
        self._on_broken = on_broken
        self._task = parts.loop.create_task(self._run())
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
        hello = agent_pb2.Chunks(hello=self._parts.handshake.hello).SerializeToString()
        async with self._parts.open_channel(self._to) as channel:
            call = channel.stream_unary(TRANSFER_METHOD)()
            try:
                await write_frame(call, hello)
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
        bytes_left = self._parts.options.chunk_bytes
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
