"""An envelope of which more has to come than what a socket is read by at a time, while it is being received."""

from collections.abc import Callable
from typing import final

from google.protobuf.message import DecodeError

from ...proto.v1 import agent_pb2
from ..contracts.options import MAX_ATTACHED_BYTES
from ..wire.parsing import parse_envelope
from .tls_socket import AnySocket, TlsSocket

__all__ = ["Arrived", "AttachedBytes", "LargeEnvelope"]


Arrived = tuple[agent_pb2.Envelope, int] | tuple[agent_pb2.Envelope, int, memoryview]
"""An envelope, the bytes of memory that it takes, and those that followed it, if any did."""


class _Missing:
    """Memory that is filled from a socket. Used by the thread that reads."""

    def __init__(self, memory: memoryview) -> None:
        self._missing = memory

    def read(self, connection: AnySocket) -> bytes:
        """Reads what has arrived; returns what belongs to the frames after it.

        Raises:
            BlockingIOError: nothing has arrived.
            ConnectionResetError: the peer has closed the connection.
        """
        if isinstance(connection, TlsSocket):  # decrypts all that has arrived
            data = connection.recv()
            count = self.fill(data)
            after = data[count:]
        else:
            count = connection.recv_into(self._missing)
            self._missing = self._missing[count:]
            after = b""
        if not count:
            raise ConnectionResetError
        return after

    def fill(self, data: bytes | memoryview) -> int:
        """Takes as much of some bytes as is missing; returns how many."""
        count = min(len(data), len(self._missing))
        self._missing[:count] = data[:count]
        self._missing = self._missing[count:]
        return count


@final
class LargeEnvelope(_Missing):
    """Receives into memory of the envelope's size."""

    def __init__(self, nbytes: int, beginning: bytes) -> None:
        """Args: nbytes: of the envelope. beginning: those that have been read already, fewer than that."""
        self._data = bytearray(nbytes)
        super().__init__(memoryview(self._data))
        self.fill(beginning)

    @property
    def arrived(self) -> Arrived | None:
        """The envelope; None if it is not complete. Raises DecodeError."""
        return None if self._missing else parse_envelope(bytes(self._data))


@final
class AttachedBytes(_Missing):
    """Receives the bytes that follow an envelope, into memory that becomes that of its tensors."""

    def __init__(self, data: bytes, allocate: Callable[[int], memoryview]) -> None:
        """Allocates the memory.

        Args:
            data: the serialized envelope.
            allocate: see SocketParts.

        Raises:
            DecodeError: it is no envelope, or says that nothing, or too much, follows it.
            MemoryError: there is no memory.
        """
        self.envelope, self._nbytes = parse_envelope(data)
        nbytes = self.envelope.attached_nbytes
        if not 0 < nbytes <= MAX_ATTACHED_BYTES:
            raise DecodeError(f"{nbytes} bytes that are attached to an envelope")
        self.memory = allocate(nbytes)
        super().__init__(self.memory)

    @property
    def arrived(self) -> Arrived | None:
        """The envelope and what followed it; None if that is not complete."""
        if self._missing:
            return None
        return self.envelope, self._nbytes + len(self.memory), self.memory
