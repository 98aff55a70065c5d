"""All gRPC streams of one agent, and what serves those that other workers open."""

from collections.abc import AsyncIterator
from typing import Any, final

import grpc

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo
from .grpc_calls import StreamParts, welcome_frame
from .grpc_endpoint import address_of
from .grpc_stream import GrpcStream
from .handshake import RefusedError

__all__ = ["GrpcStreams"]


@final
class GrpcStreams:
    """The stream to each peer. Used on the event loop only, except `add`."""

    def __init__(self, parts: StreamParts) -> None:
        """Args: parts: of the agent."""
        self.sockets = parts.sockets
        self._parts = parts
        self._addresses: dict[int, str] = {}
        self._streams: dict[int, GrpcStream] = {}
        self._ended: list[GrpcStream] = []
        """Streams that have been replaced, and whose sockets a thread may be reading."""
        self._refused: dict[int, str] = {}
        """Why peers are let in no more, which have no stream."""

    def add(self, peer: WorkerInfo, address: str) -> GrpcStream:
        """Makes the stream to a peer, before the peer is admitted. It is opened when it is first used.

        Args:
            peer: the worker at the other end.
            address: of the peer's server: host:port, or unix: and a path.
        """
        self._addresses[peer.wire_id] = address
        stream = self._streams[peer.wire_id] = GrpcStream(self._parts, peer, address)
        return stream

    def renew(self, peer: WorkerInfo) -> GrpcStream:
        """Makes another stream to a peer, whose stream has ended. It is opened when it is first used."""
        ended = self._streams[peer.wire_id]
        self._keep_socket(ended)
        address = self._addresses[peer.wire_id]
        stream = self._streams[peer.wire_id] = GrpcStream(self._parts, peer, address, ended.number + 1)
        return stream

    def connect(self, peer: int) -> None:
        """Opens the stream to a peer, if it is not open."""
        if (stream := self._streams.get(peer)) is not None:
            stream.connect()

    def abort(self, peer: int, reason: str) -> None:
        """Ends the stream to a peer that cannot be used any more; see `GrpcStream.abort`."""
        if (stream := self._streams.get(peer)) is not None:
            stream.abort(reason)

    def break_off(self, peer: int, reason: str) -> None:
        """Ends the stream to a peer, which may be connected again; see `GrpcStream.break_off`."""
        if (stream := self._streams.get(peer)) is not None:
            stream.break_off(reason)

    def refuse(self, peer: int, reason: str) -> None:
        """Lets a peer in no more, which is lost, and keeps nothing of its stream; see `GrpcStream.refuse`."""
        if (stream := self._streams.pop(peer, None)) is not None:
            stream.refuse(reason)
            self._keep_socket(stream)
            self._refused[peer] = reason
            del self._addresses[peer]

    def _keep_socket(self, ended: GrpcStream) -> None:
        """Keeps a stream that has ended while a thread may read its socket."""
        if ended.outbox.socket is not None:
            self._ended = [each for each in self._ended if not each.has_read_out]
            self._ended.append(ended)

    def send_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Sends a frame without envelopes by the stream to a peer."""
        if (stream := self._streams.get(peer)) is None:
            return
        if not stream.outbox.put_frame(frame.SerializeToString()):
            self.abort(peer, "it does not read the answers to what it asks for")
        stream.connect()

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: ARG002
        """Serves the Exchange method of the agent's gRPC service."""
        try:
            peer, hello = await self._parts.handshake.receive_hello(context)
        except RefusedError as refusal:
            await context.abort(refusal.code, str(refusal))
        stream = self._streams.get(peer.wire_id)
        if stream is not None and not stream.goodbye and stream.is_replaced_by(hello.connection):
            stream.break_off("it has connected again")
            stream = self._streams.get(peer.wire_id)
        if stream is None:
            text = f"it has given this worker up: {self._refused[peer.wire_id]}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
            return
        if stream.goodbye:
            await context.write(stream.goodbye)
            stream.on_goodbye_sent()
            return
        if (reason := stream.outbox.closed_reason) is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"it has given this worker up: {reason}")
        if stream.accept(hello.connection):
            await stream.welcome(context.read, context.write, address_of(context))
        else:
            await context.write(welcome_frame(duplicate=True))

    def release(self) -> None:
        """Releases the sockets that no thread reads any more. Called when the executor has ended."""
        for stream in (*self._streams.values(), *self._ended):
            if stream.outbox.socket is not None:
                stream.outbox.socket.release()
