"""What the streams of an agent need to have sockets beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from ...proto.v1 import agent_pb2
from ..execution.executor import Executor
from .base import TransportListener
from .envelope_socket import EnvelopeSocket, OnSocketEnd
from .frame_reader import FrameReader
from .pulse import Pulse, PulseExchange
from .segments import SegmentListener
from .sockets import UNIX, SocketListener
from .tls_socket import AnySocket

__all__ = ["FrameListener", "SocketParts"]


class FrameListener(Protocol):
    """Handles fields of frames that have nothing to do with envelopes. Called on the event loop."""

    def on_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Handles the frame of a peer; most frames have no such field."""


@final
@dataclass(frozen=True, slots=True)
class SocketParts:
    """What the streams of an agent need for sockets.

    kinds: of sockets that may be used: UNIX, TCP or both; empty if gRPC carries the envelopes.
    listener: accepts connections.
    executor: its threads read the sockets.
    is_same_host: tells by the id of a worker whether it is on this host, in this network namespace.
    segments: returns what handles the frames about shared memory, on a new unix socket to the worker with this id.
    listeners: handle what comes by the stream and has nothing to do with envelopes.
    pulse: by which workers of this host see that this one is alive.
    allocate: returns memory of so many bytes for what follows envelopes. Raises MemoryError if there is none.
    """

    kinds: Sequence[str]
    listener: SocketListener
    executor: Executor
    is_same_host: Callable[[int], bool]
    segments: Callable[[int], SegmentListener]
    listeners: Sequence[FrameListener]
    pulse: Pulse
    allocate: Callable[[int], memoryview]

    def make(
        self,
        kind: str,
        connection: AnySocket,
        peer: TransportListener,
        on_end: OnSocketEnd,
        on_malformed: Callable[[Exception], None],
    ) -> EnvelopeSocket:
        """Returns what carries envelopes by a socket; it does not read before its `start`.

        Args:
            kind: UNIX or TCP.
            connection: the socket, connected to the peer.
            peer: the worker at the other end; gets the envelopes.
            on_end: called with the reason when the socket ends.
            on_malformed: called before that with the error if the peer has sent bytes that are no message.
        """
        segments = self.segments(peer.info.wire_id) if kind == UNIX else None
        pulses = PulseExchange(self.pulse) if kind == UNIX else None
        reader = FrameReader(peer.on_envelope, segments, pulses, self.allocate)
        made = EnvelopeSocket(kind, connection, self.executor, reader, on_end, on_malformed)
        if segments is not None:
            segments.connect(made)
        return made

    def on_frame(self, peer: int, frame: agent_pb2.Frame) -> None:
        """Has the listeners handle a frame of a peer."""
        for listener in self.listeners:
            listener.on_frame(peer, frame)
