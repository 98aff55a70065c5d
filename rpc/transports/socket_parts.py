"""What the streams of an agent need to have sockets beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from ..execution.executor import Executor
from .base import TransportListener
from .envelope_socket import EnvelopeSocket, OnSocketEnd
from .frame_reader import FrameReader
from .pulse import Pulse, PulseExchange
from .sockets import UNIX, SocketListener
from .tls_socket import AnySocket

__all__ = ["SocketParts"]


@final
@dataclass(frozen=True, slots=True)
class SocketParts:
    """What the streams of an agent need for sockets.

    kinds: of sockets that may be used: UNIX, TCP or both; empty if gRPC carries the envelopes.
    listener: accepts connections.
    executor: its threads read the sockets.
    pulse: by which workers of this host see that this one is alive.
    allocate: returns memory of so many bytes for what follows envelopes. Raises MemoryError if there is none.
    """

    kinds: Sequence[str]
    listener: SocketListener
    executor: Executor
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
        segments = peer.new_segments() if kind == UNIX else None
        pulses = PulseExchange(self.pulse) if kind == UNIX else None
        reader = FrameReader(peer.on_envelope, segments, pulses, self.allocate)
        made = EnvelopeSocket(kind, connection, self.executor, reader, on_end, on_malformed)
        if segments is not None:
            segments.connect(made)
        return made
