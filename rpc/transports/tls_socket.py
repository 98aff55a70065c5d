"""A TCP connection protected by TLS, for code that is written for a socket.

The TLS library works in memory: bytes are encrypted before they are written to the socket, and decrypted after
they have been read, all that has arrived at once. So there are as few system calls as without TLS, and the
socket's descriptor tells of whatever has not been read, except where `recv_into` is used (see `has_unread`).

One thread at a time may read, and one may write; a lock has them take turns in the library, which allows only one
of them. A signal handler that raises, as that of Ctrl-C, may interrupt the main thread between any two steps, and
within the library, which then does not tell what it has done. So each step begins with finding out how far the one
before it came: `pending` and the buffers of the library tell. Whoever comes next goes on from there.
"""

import asyncio
import errno
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import compress, repeat, starmap
from typing import Any, TypeAlias, cast, final

from ...c10d.security import certified_names
from ...c10d.socket_peers import address_of_peer

__all__ = ["AnySocket", "TlsSocket"]

READ_BYTES = 256 << 10
"""Bytes read at a time, encrypted."""

ENCRYPT_BYTES = 256 << 10
"""Bytes encrypted at a time: few enough to stay in the processor's cache until they are written."""

RECORD_BYTES = 1 << 14
"""Bytes of a TLS record, at most, besides what the encryption adds to it."""

HANDSHAKE_READ_BYTES = 16 << 10


@final
class _Encrypted:
    """Bytes that are being encrypted and written."""

    __slots__ = ("ciphertext", "nbytes", "pieces", "sent")

    def __init__(self, pieces: list[bytes | memoryview]) -> None:
        self.pieces = pieces
        self.nbytes = sum(map(len, pieces))
        self.ciphertext: list[bytes] = []
        """One for each of the first pieces: those that are encrypted."""
        self.sent: list[int] = []
        """How many bytes of the ciphertext each call has written."""


@final
class TlsSocket:
    """A connected, non-blocking TCP socket with TLS, after `handshake`.

    Its methods take and return what those of the same name of a socket do, if they are not described here. Errors
    of TLS are `ssl.SSLError`, which is an OSError.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host_name: str | None) -> None:
        """Takes over a connected socket.

        Args:
            connection: the socket.
            context: for the side that this process is on.
            host_name: for which the peer's certificate must be; None if this side has accepted the connection.
        """
        connection.settimeout(0)
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, host_name is None, host_name)
        # The functions in C. Those of SSLObject are Python around them, in which a signal may be handled before it
        # comes to the call.
        library = cast("Any", self._ssl)._sslobj
        self._read, self._write, self._pending = library.read, library.write, library.pending
        self._lock = threading.RLock()
        """Held while the library is used; reentrant for a signal handler that sends."""
        self._failure: OSError | None = None
        """Why nothing more can be read."""
        # Of the thread that reads.
        self._locked: list[tuple[()]] = []
        """Not empty while it holds the lock."""
        self._unlock: Iterator[None] = iter(())
        """Releases the lock, and removes that, in one step."""
        self._first = bytearray(1)
        """The first byte of the record that is being read: the library decrypts the record to return it."""
        self._record: bytearray | None = None
        """Where the record is read to. It has been if nothing is pending."""
        self._records: list[bytes | bytearray] = []
        """Those that have been read."""
        # Of the thread that writes.
        self._encrypted: _Encrypted | None = None

    # Before other threads use it: on the event loop.

    async def handshake(self, loop: asyncio.AbstractEventLoop) -> frozenset[str]:
        """Exchanges certificates with the peer; returns the host names in the peer's.

        Raises:
            OSError: the peer does not speak TLS, or one of the two does not accept the other's certificate.
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

    async def send_soon(self, loop: asyncio.AbstractEventLoop, data: bytes) -> None:
        """Sends some bytes."""
        self._ssl.write(data)
        await self._flush(loop)

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

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._socket.fileno()

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

    def shutdown(self, how: int) -> None:
        """Shuts the socket down, without TLS's closure alert: what is sent by it has an end of its own."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    # Sending.

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Sends the beginning of `data`; see `sendmsg`."""
        if self._encrypted is None and len(data) <= RECORD_BYTES:
            self._encrypted = _Encrypted([data])
        return self.sendmsg((data,), (), flags)

    def sendmsg(
        self, buffers: Sequence[bytes | memoryview], _ancillary: Sequence[Any] = (), flags: int = 0
    ) -> int:
        """Sends some bytes from the beginning of the buffers; returns how many.

        After BlockingIOError, or if a signal has interrupted it, some of them may have been encrypted and sent. So
        it must be called again with the same bytes, and the next call counts them.
        """
        encrypted = self._encrypted
        if encrypted is None:
            encrypted = self._encrypted = _Encrypted(_beginning(buffers))
        while len(encrypted.ciphertext) < len(encrypted.pieces):
            if not self._outgoing.pending:  # else an interrupted call has not taken what it has encrypted
                self._encrypt(encrypted.pieces[len(encrypted.ciphertext)])
            encrypted.ciphertext.extend(map(self._outgoing.read, (-1,)))
        sent, size = encrypted.sent, sum(map(len, encrypted.ciphertext))
        while not sent or sum(sent) < size:
            rest = _without(encrypted.ciphertext, sum(sent)) if sent else encrypted.ciphertext
            sent.extend(map(self._socket.sendmsg, (rest,), ((),), (flags,)))
        self._encrypted = None  # no call comes between this and the return
        return encrypted.nbytes

    def _encrypt(self, piece: bytes | memoryview) -> None:
        locked: list[bool] = []
        try:
            locked.extend(map(self._lock.acquire, (True,)))
            self._write(piece)
        finally:
            if locked:
                self._lock.release()

    # Receiving.

    def recv(self, _nbytes: int = READ_BYTES) -> bytes:
        """Returns all that has arrived; b"" if the peer has closed the connection.

        Only for threads that handle no signals.
        """
        held = [True]
        with self._lock:
            try:
                is_open = self._feed(held)
            except BlockingIOError:
                is_open = True
            if self._record is not None or self._pending():  # left by an interrupted thread
                is_open = self._decrypt(held) and is_open
            is_open = self._decrypt(None) and is_open
            records, self._records = self._records, []
        if not records and is_open:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
        return b"".join(records)

    def receive(self, received: list[bytes], held: list[bool]) -> None:
        """Reads and decrypts all that has arrived, as long as the calling thread is the one that reads.

        Args:
            received: what has arrived is appended; b"" if the peer has closed the connection, or if this is
                interrupted: then `recv` tells which, or continues.
            held: is not [True] any more when another thread has become the one that reads: see `release_library`.
        """
        if held != [True]:
            return
        received += [b""]
        locked: list[tuple[()]] = []
        lock = compress(((),), map(self._lock.acquire, (True,)))
        unlock = starmap(self._lock.release, map(locked.pop, repeat(-1)))
        try:
            try:
                is_open = self._feed(held)
            except BlockingIOError:
                is_open = True
            if held == [True]:
                self._locked, self._unlock = locked, unlock
                locked.extend(lock)
            is_open = self._decrypt(held) and is_open
            data = b"".join(self._records)
            if held == [True]:  # no call comes between this and the end of the block
                received[-1:] = [data] if data or not is_open else []
                self._records = []
        finally:
            if locked:
                next(unlock)

    def release_library(self) -> None:
        """Releases what the calling thread holds in `receive`: a signal handler in it is about to wait."""
        if self._locked:
            next(self._unlock)

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        """Fills the buffer as far as bytes have arrived. Only for threads that handle no signals."""
        view = memoryview(buffer)
        filled = 0
        with self._lock:
            while filled < view.nbytes:
                try:
                    is_empty = not (self._pending() or self._incoming.pending)
                    if is_empty and not self._feed([True]):
                        break
                    filled += self._read(view.nbytes - filled, view[filled:])
                except ssl.SSLWantReadError:
                    continue  # the library has taken the beginning of a record
                except ssl.SSLZeroReturnError:
                    break
                except BlockingIOError:
                    if not filled:
                        raise
                    break
        return filled

    def has_unread(self) -> bool:
        """Returns whether `recv_into` has left something of which the socket's descriptor does not tell."""
        with self._lock:
            return bool(self._pending() or self._incoming.pending)

    # What follows does nothing more when `held` is not [True]: that is looked at right before each C function,
    # and no signal is handled in between.

    def _feed(self, held: list[bool]) -> bool:
        """Gives the library what has arrived; returns False if the peer has closed the connection.

        Raises BlockingIOError if nothing has arrived.
        """
        written: list[int] = []
        chunks = map(self._incoming.write, map(self._socket.recv, (READ_BYTES,)))
        if held == [True]:
            written.extend(chunks)
        return written != [0]

    def _decrypt(self, held: list[bool] | None) -> bool:
        """Reads all records that are complete; returns False after the peer's last one.

        Args:
            held: None if no signal can interrupt the thread, and none has left anything.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if held is not None:
                self._read_interruptibly(held)
            else:
                while self._incoming.pending:
                    self._records.append(self._read(RECORD_BYTES))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            return False
        except ssl.SSLError as error:
            self._failure = error
            raise
        return True

    def _read_interruptibly(self, held: list[bool]) -> None:
        while held == [True]:
            left, record = self._pending(), self._record
            if record is None:
                if not left:
                    if not self._incoming.pending:
                        break
                    if held == [True]:
                        self._read(1, self._first)
                    left = self._pending() if held == [True] else 0
                record = bytearray(1 + left)
                record[0] = self._first[0]
                if held == [True]:
                    self._record = record
            rest = memoryview(record)[1:]
            if left and held == [True]:
                self._read(left, rest)
            if held == [True]:
                self._records += [record]
                self._record = None


def _beginning(buffers: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Returns what is encrypted at a time."""
    pieces: list[bytes | memoryview] = []
    bytes_left = ENCRYPT_BYTES
    for buffer in buffers:
        piece = buffer if len(buffer) <= bytes_left else memoryview(buffer)[:bytes_left]
        if len(piece) % RECORD_BYTES == 1 and len(piece) > 1:
            # A record of one byte would be read by the first step of `_decrypt` alone, which nothing tells.
            pieces.append(memoryview(piece)[:-2])
            break
        pieces.append(piece)
        bytes_left -= len(piece)
        if not bytes_left:
            break
    return pieces


def _without(data: Sequence[bytes], count: int) -> Sequence[bytes | memoryview]:
    """Returns what remains without the first `count` bytes."""
    rest: list[memoryview] = []
    for each in data:
        if count < len(each):
            rest.append(memoryview(each)[count:])
        count = max(0, count - len(each))
    return rest


AnySocket: TypeAlias = socket.socket | TlsSocket
"""A socket with or without TLS."""
