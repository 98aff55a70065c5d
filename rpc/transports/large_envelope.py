"""An envelope that is larger than what a socket is read by at a time, while it is being received."""

from typing import final

from .tls_socket import AnySocket, TlsSocket

__all__ = ["LargeEnvelope"]


@final
class LargeEnvelope:
    """Receives into memory of the envelope's size. Used by the thread that reads."""

    def __init__(self, nbytes: int, beginning: bytes) -> None:
        """Args: nbytes: of the envelope. beginning: those that have been read already, fewer than that."""
        self._data = bytearray(nbytes)
        self._missing = memoryview(self._data)
        self._fill(beginning)

    @property
    def data(self) -> bytes | None:
        """The serialized envelope; None if it is not complete."""
        return None if self._missing else bytes(self._data)

    def read(self, connection: AnySocket) -> bytes:
        """Reads what has arrived; returns what belongs to the frames after it.

        Raises:
            BlockingIOError: nothing has arrived.
            ConnectionResetError: the peer has closed the connection.
        """
        if isinstance(connection, TlsSocket):  # decrypts all that has arrived
            data = connection.recv()
            count = min(len(data), len(self._missing))
            self._fill(data[:count])
            after = data[count:]
        else:
            count = connection.recv_into(self._missing)
            self._missing = self._missing[count:]
            after = b""
        if not count:
            raise ConnectionResetError
        return after

    def _fill(self, data: bytes) -> None:
        self._missing[: len(data)] = data
        self._missing = self._missing[len(data) :]
