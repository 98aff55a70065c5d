"""A TCP connection protected by TLS, for code that is written for a socket.

The TLS library works in memory: bytes are encrypted before they are written to the socket, and decrypted after
they have been read, all that has arrived at once. So there are as few system calls as without TLS, and the
socket's descriptor tells of whatever has not been read, except where `recv_into` is used (see `has_unread`).

One thread at a time may read, and one may write; a lock has them take turns in the library, which allows only one
of them.
"""

import asyncio
import errno
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast, final

from ...net.security import certified_names
from ...net.socket_peers import address_of_peer

__all__ = ["AnySocket", "TlsSocket", "send_some"]

READ_BYTES = 256 << 10
"""Bytes read at a time, encrypted."""

ENCRYPT_BYTES = 256 << 10
"""Bytes encrypted at a time: few enough to stay in the processor's cache until they are written."""

RECORD_BYTES = 1 << 14
"""Bytes of a TLS record, at most, besides what the encryption adds to it."""

HANDSHAKE_READ_BYTES = 16 << 10

MAX_AT_ONCE = 512 << 10
"""Bytes that one call of `sendmsg` writes, at most. On the loopback interface, while the peer reads, one call with
1 MiB took twice as long as two with half of it."""


@final
class TlsSocket:
    """A connected, non-blocking TCP socket with TLS, after `handshake`.

    Its methods take and return what those of the same name of a socket do, if they are not described here. Errors
    of TLS are `ssl.SSLError`, which is an OSError.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host_name: str | None) -> None:
        """Takes over a connected socket. The peer's certificate must be for `host_name`.

        If this side has accepted the connection, that is None, and the context is a server's, else a client's.
        """
        connection.settimeout(0)
        self._socket = connection
        # Without TLS's closure alert: what is sent by it has an end of its own.
        self.fileno, self.shutdown, self.close = connection.fileno, connection.shutdown, connection.close
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, host_name is None, host_name)
        # The functions in C, without the Python of SSLObject around them.
        library = cast("Any", self._ssl)._sslobj
        self._read, self._write, self._pending = library.read, library.write, library.pending
        self._lock = threading.RLock()
        """Held while the library is used; reentrant for a signal handler that sends."""
        # Of the thread that reads.
        self._is_at_end = False
        """Whether the peer has closed the connection by TLS's closure alert, after which nothing is read."""
        # Of the thread that writes.
        self._unsent: memoryview | None = None
        """What is encrypted and not written."""
        self._encrypted = 0
        """The bytes that this was before it was encrypted."""

    # Before other threads use it: on the event loop.

    async def handshake(self, loop: asyncio.AbstractEventLoop) -> frozenset[str]:
        """Exchanges certificates with the peer; returns the host names in the peer's.

        Raises OSError if the peer does not speak TLS, or one of the two does not accept the other's certificate.
        """
        while True:
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush(loop)
                await self._fill(loop)
            except ssl.SSLError:
                with suppress(OSError):
                    await self._flush(loop)  # tells the peer why
                raise
            else:
                await self._flush(loop)
                return certified_names(self._ssl.getpeercert())

    async def receive_soon(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        """Returns between 1 and `count` bytes; none if the peer has closed the connection."""
        while True:
            try:
                return self._ssl.read(count)
            except ssl.SSLWantReadError:
                await self._fill(loop)
            except ssl.SSLZeroReturnError:
                return b""

    async def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        await loop.sock_sendall(self._socket, self._outgoing.read())

    async def _fill(self, loop: asyncio.AbstractEventLoop) -> None:
        data = await loop.sock_recv(self._socket, HANDSHAKE_READ_BYTES)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        self._incoming.write(data)

    # What a socket has.

    def peer_address(self) -> str:
        """Returns the address of the other end; empty if it has gone."""
        return address_of_peer(self._socket)

    def settimeout(self, seconds: float) -> None:
        """Does nothing: the socket does not block."""

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Sets an option of the socket."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            value = max(1, value - RECORD_BYTES)  # the library may have taken a part of a record
        self._socket.setsockopt(level, option, value)

    # Sending.

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Sends the beginning of `data`; see `sendmsg`."""
        return self.sendmsg((data,), (), flags)

    def sendmsg(
        self, buffers: Sequence[bytes | memoryview], _ancillary: Sequence[Any] = (), flags: int = 0
    ) -> int:
        """Sends some bytes from the beginning of the buffers; returns how many.

        After BlockingIOError, some of them may have been encrypted and sent. So it must be called again with the
        same bytes, and the next call counts them.
        """
        if self._unsent is None:
            left = ENCRYPT_BYTES
            with self._lock:
                for buffer in buffers:
                    piece = memoryview(buffer)[:left]
                    self._write(piece)
                    left -= len(piece)
                    if not left:
                        break
                self._unsent = memoryview(self._outgoing.read())
            self._encrypted = ENCRYPT_BYTES - left
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent, flags) :]
        self._unsent = None
        return self._encrypted

    # Receiving.

    def recv(self, _nbytes: int = READ_BYTES) -> bytes:
        """Returns all that has arrived; b"" if the peer has closed the connection."""
        records: list[bytes] = []
        is_open = not self._is_at_end
        with self._lock:
            if is_open:
                with suppress(BlockingIOError):
                    is_open = self._feed()
            with suppress(ssl.SSLWantReadError):
                while not self._is_at_end and (self._incoming.pending or self._pending()):
                    if record := self._read_some(RECORD_BYTES):
                        records.append(record)
        if not records and is_open and not self._is_at_end:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
        return b"".join(records)

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        """Fills the buffer as far as bytes have arrived."""
        view = memoryview(buffer)
        filled = 0
        with self._lock:
            while filled < view.nbytes and not self._is_at_end:
                try:
                    is_empty = not (self._pending() or self._incoming.pending)
                    if is_empty and not self._feed():
                        break
                    filled += self._read_some(view.nbytes - filled, view[filled:])
                except ssl.SSLWantReadError:
                    continue  # the library has taken the beginning of a record
                except BlockingIOError:
                    if not filled:
                        raise
                    break
        return filled

    def has_unread(self) -> bool:
        """Returns whether `recv_into` has left something of which the socket's descriptor does not tell."""
        with self._lock:
            return bool(self._is_at_end or self._pending() or self._incoming.pending)

    def _read_some(self, nbytes: int, *buffer: memoryview) -> Any:
        """Returns what the library's `read` does; notes the end, where it returns nothing or raises an error."""
        try:
            got = self._read(nbytes, *buffer)
        except ssl.SSLZeroReturnError:
            self._is_at_end = True
            return 0 if buffer else b""
        if not got:
            self._is_at_end = True
        return got

    def _feed(self) -> bool:
        """Gives the library what has arrived; returns False if the peer has closed the connection.

        Raises BlockingIOError if nothing has arrived.
        """
        data = self._socket.recv(READ_BYTES)
        self._incoming.write(data)
        return bool(data)


AnySocket: TypeAlias = socket.socket | TlsSocket
"""A socket with or without TLS."""


def send_some(connection: AnySocket, buffers: Sequence[memoryview]) -> tuple[int, list[memoryview]]:
    """Sends some bytes from the beginning of buffers, by one call; returns how many, and what is left."""
    first, bytes_left = [], MAX_AT_ONCE
    for buffer in buffers:
        if bytes_left > 0:
            first.append(buffer[:bytes_left])
        bytes_left -= buffer.nbytes
    count = sent = connection.sendmsg(first, (), socket.MSG_NOSIGNAL)
    left = []
    for buffer in buffers:
        if sent < buffer.nbytes:
            left.append(buffer[sent:])
        sent = max(0, sent - buffer.nbytes)
    return count, left
