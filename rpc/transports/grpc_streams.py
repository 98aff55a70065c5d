"""The gRPC streams of one agent, and what serves those that other workers open."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, final

import grpc

from ..contracts.worker import WorkerEnd
from .base import TransportListener
from .grpc_calls import StreamParts, welcome_frame
from .grpc_endpoint import address_of
from .grpc_stream import GrpcStream
from .handshake import RefusedError

__all__ = ["GrpcStreams", "StreamPeer"]


class StreamPeer(TransportListener, Protocol):
    """A peer that may be connected by a stream."""

    stream: GrpcStream | None
    """None if it is let in no more."""

    end: WorkerEnd | None
    """Why it is not."""


@final
class GrpcStreams:
    """Makes the stream to each peer. Used on the event loop only, except `make`."""

    def __init__(self, parts: StreamParts, peers: Mapping[int, StreamPeer]) -> None:
        """Makes the streams of an agent to its peers, which it knows by the id of their worker."""
        self._parts = parts
        self._peers = peers

    def make(self, peer: TransportListener, address: str) -> GrpcStream:
        """Makes the stream to a peer, before the peer is admitted. It is opened when it is first used."""
        return GrpcStream(self._parts, peer, address)

    def renew(self, ended: GrpcStream) -> GrpcStream:
        """Makes another stream in place of one that has ended. It is opened when it is first used."""
        return GrpcStream(self._parts, ended.peer, ended.address, ended.number + 1)

    async def serve(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: ARG002
        """Serves the Exchange method of the agent's gRPC service."""
        try:
            worker, hello = await self._parts.handshake.receive(context)
        except RefusedError as refusal:
            await context.abort(refusal.code, str(refusal))
        peer = self._peers[worker.wire_id]
        stream = peer.stream
        if stream is not None and not stream.goodbye and stream.is_replaced_by(hello.connection):
            stream.break_off("it has connected again")
            stream = peer.stream
        if stream is None:
            assert peer.end is not None
            text = f"it has given this worker up: {peer.end.reason}"
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
        for connection in list(self._parts.unread):
            connection.release()
