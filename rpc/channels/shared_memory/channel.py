"""The channel for large payloads to a worker of this host: segments of shared memory."""

from typing import ClassVar, final

from ....proto.v1 import agent_pb2
from ...contracts.messages import Buffer
from ..base import PayloadLostError, check_size
from .memory import SharedMemory
from .peer import PeerSegments

__all__ = ["SharedMemoryChannel"]


@final
class SharedMemoryChannel:
    """Copies payloads into segments, which the receiver maps, and so receives them without a copy.

    What has come from a worker in a segment, and nothing else refers to, goes back to it in the same one: that
    takes no copy at all.

    A worker is connected while there is a unix socket to it. Payloads for others, and beyond the limit of shared
    memory, have to go by another channel.
    """

    name: ClassVar[str] = "segment"

    def __init__(self, memory: SharedMemory, *, may_connect: bool) -> None:
        """Shares nothing yet; never if there can be no unix socket to the worker."""
        self.may_connect = may_connect
        self._memory = memory
        self.segments = memory.new_segments()
        """Those of the socket that there is now, or was last."""
        self._former: PeerSegments | None = None
        """Those of the last connection that broke: some of what came by it may be read after that."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a unix socket to the worker."""
        return self.segments.is_connected

    def connect(self) -> PeerSegments:
        """Returns what handles the frames about segments on a new socket. Called on the loop."""
        self.segments = self._memory.new_segments()
        return self.segments

    def receive(self, payload: agent_pb2.Payload) -> Buffer:
        """Returns the bytes in their segment. Called by the thread that reads the socket."""
        number, nbytes = payload.segment.number, payload.segment.nbytes
        check_size(nbytes, self._memory.options)
        segments = self.segments
        try:
            if payload.segment.sent_back:
                return segments.use_own(number, nbytes)
            return segments.mapped.use(number, nbytes)
        except ValueError:
            former = self._former
            # A worker's numbers only grow.
            if former is not None and number <= former.highest(sent_back=payload.segment.sent_back):
                raise PayloadLostError("its connection broke before it was read") from None
            raise

    def discard(self, payload: agent_pb2.Payload) -> None:
        """Gives the segment back. Called on any thread."""
        segments, number = self.segments, payload.segment.number
        if payload.segment.sent_back:
            segments.on_released([number])
        else:
            segments.mapped.drop(number)

    def drop(self, error: Exception) -> None:
        """Drops the segments of the connection. Bytes that were received stay readable and writable."""
        self._former = self.segments  # first: another thread may read at the same time
        self.segments.close()
        if isinstance(error, ConnectionError):  # there is no other one
            self._former = None

    def remove_idle(self) -> None:
        """Drops the free segments, if nothing has been sent since the last call."""
        segments = self.segments
        self._memory.drop(segments.pool.remove_idle(), [segments])
