"""Bulk connections, by which the large payloads of one worker go to another: a bundle of them, and its two ends.

Payloads travel in parts, each with a header. All connections of a bundle take parts from one queue, each when its
socket has space, and payloads take turns. So a large payload uses all connections, and does not hold up a smaller
one behind it. Parts are written from the memory of their tensors, and read into it. The thread that sends a
payload also writes, as far as the socket takes it, and threads of the executor go on when there is space; those
read, too.

A header has no sizes: those follow from the size that the payload's envelope announces. So a header cannot make
the receiver allocate, or read, anything that has not been announced. A part whose payload has not been announced
stays in its socket: its connection is not read before that, and flow control stops the sender.
"""

import concurrent.futures
import contextlib
import logging
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ...net.inheritance import at_fork
from ..execution.executor import Executor
from ..execution.poller import READABLE, WRITABLE
from ..transports.tls_socket import AnySocket, TlsSocket, send_some
from .base import MAX_ANNOUNCED, Arriving, PayloadLostError

__all__ = [
    "HEADER_BYTES",
    "PART_BYTES",
    "ReceivingBundle",
    "SendingBundle",
    "count_parts",
    "pack_header",
    "range_of_part",
    "unpack_header",
]

PART_BYTES = 1 << 20
"""Bytes of each part of a payload but the last one. Part of the protocol."""

_MAGIC = b"part"
_HEADER = struct.Struct("<4sIQ")

HEADER_BYTES = _HEADER.size

TURN_BYTES = 4 << 20
"""Bytes after which a thread that writes to a connection, or reads it, looks at others."""

DROP_BYTES = 64 << 10
"""Bytes read at a time of a payload that is not wanted."""

log = logging.getLogger(__name__)


def pack_header(transfer_id: int, number: int) -> bytes:
    """Returns the header of a part of a payload, which is numbered from 0, as it is sent."""
    return _HEADER.pack(_MAGIC, number, transfer_id)


def unpack_header(data: bytes | bytearray) -> tuple[int, int]:
    """Returns the transfer id and the number in HEADER_BYTES bytes. Raises ValueError if they are no header."""
    magic, number, transfer_id = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ValueError(f"the header of a part begins with {magic!r}, not {_MAGIC!r}")
    return transfer_id, number


def count_parts(nbytes: int) -> int:
    """Returns how many parts a payload has."""
    return -(-nbytes // PART_BYTES)


def range_of_part(number: int, nbytes: int) -> tuple[int, int]:
    """Returns where a part of a payload of `nbytes` begins and ends. Raises ValueError if it has no such part."""
    start = number * PART_BYTES
    if not 0 <= start < nbytes:
        raise ValueError(f"part {number} of a payload of {nbytes} bytes")
    return start, min(start + PART_BYTES, nbytes)


@final
class _QueuedPayload:
    """A payload of which parts remain to be sent."""

    __slots__ = ("count", "data", "next_number", "transfer_id")

    def __init__(self, transfer_id: int, data: memoryview) -> None:
        self.transfer_id = transfer_id
        self.data = data
        self.count = count_parts(data.nbytes)
        self.next_number = 0

    def next_part(self) -> list[memoryview]:
        start, end = range_of_part(self.next_number, self.data.nbytes)
        header = pack_header(self.transfer_id, self.next_number)
        self.next_number += 1
        return [memoryview(header), self.data[start:end]]


@final
class SendingBundle:
    """The connections by which payloads go to one peer. All of it ends when one of the connections does."""

    def __init__(
        self, number: int, connections: Sequence[AnySocket], executor: Executor, on_end: Callable[[str], None]
    ) -> None:
        """Takes over connected sockets. `on_end` is called once, on any thread, with the reason of the end.

        Raises OSError if there are too few file descriptors. Then the connections are closed.
        """
        self.number = number
        self._executor = executor
        self._on_end = on_end
        self._lock = threading.Lock()
        self._payloads: deque[_QueuedPayload] = deque()
        """Those with parts that no connection has taken."""
        try:
            self._connections = [
                _SendingConnection(each, os.dup(each.fileno()), self, executor) for each in connections
            ]
        except OSError:
            for each in connections:
                each.close()
            raise
        self._idle: list[_SendingConnection] = []
        """The connections that wait for a payload. Taken without the lock: the thread that removes one owns it."""
        self.has_ended = False
        _bundles_here.add(self)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the payloads that no connection has taken."""
        with self._lock:
            return sum(each.data.nbytes - each.next_number * PART_BYTES for each in self._payloads)

    def start(self) -> None:
        """Begins to watch the connections."""
        with self._lock:
            for connection in self._connections:
                connection.start()

    def put(self, transfer_id: int, data: memoryview) -> None:
        """Sends a payload, or drops it if the bundle has ended. Called on any thread."""
        if self.has_ended:
            return
        payload = _QueuedPayload(transfer_id, data)
        with self._lock:
            if self.has_ended:
                return
            self._payloads.append(payload)
        connections: list[_SendingConnection] = []
        with contextlib.suppress(IndexError):
            while len(connections) < payload.count:
                connections.append(self._idle.pop())
        for connection in connections[1:]:
            connection.wake()
        if connections:
            connections[0].write()

    def next_part(self, connection: "_SendingConnection") -> list[memoryview]:
        """Returns the next part: header and bytes. Empty if there is none: the connection is anybody's then."""
        with self._lock:
            if not self._payloads:
                if not self.has_ended:
                    self._idle.append(connection)
                return []
            payload = self._payloads.popleft()
            part = payload.next_part()
            if payload.next_number < payload.count:
                self._payloads.append(payload)
            return part

    def end(self, reason: str) -> None:
        """Ends all connections, and drops what has not been sent."""
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = True
            self._payloads.clear()
            self._idle.clear()
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.end()
        self._on_end(reason)


@final
class _SendingConnection:
    """One connection of a bundle. One thread at a time writes: the one that has taken it from the idle ones.

    Its socket is closed when nothing refers to it any more, so not while a thread uses it.
    """

    def __init__(self, connection: AnySocket, writable: int, bundle: SendingBundle, executor: Executor) -> None:
        """Takes over a connection and a second descriptor of it, which is watched for space in the socket.

        epoll knows a descriptor once; the first one is watched for the end of the connection.
        """
        connection.settimeout(0)
        self.socket = connection
        self._writable = writable
        self._bundle = bundle
        self._executor = executor
        self._buffers: list[memoryview] = []
        """What remains to be written of a part."""

    def __del__(self) -> None:
        self.socket.close()
        os.close(self._writable)

    def start(self) -> None:
        self._executor.watch(self.socket.fileno(), READABLE, self._on_readable)
        self._executor.watch(self._writable, WRITABLE, self._on_writable)  # which makes it idle, or write

    def wake(self) -> None:
        """Has a thread call `write` when the socket has space."""
        self._executor.poller.watch_again(self._writable)

    def end(self) -> None:
        self._executor.poller.unwatch(self.socket.fileno())
        self._executor.poller.unwatch(self._writable)
        with contextlib.suppress(OSError):  # the peer has closed it
            self.socket.shutdown(socket.SHUT_RDWR)

    def write(self) -> None:
        """Writes parts, until there are none, the socket is full, or TURN_BYTES are written."""
        bytes_left = TURN_BYTES
        try:
            while bytes_left > 0:
                if not self._buffers:
                    buffers = self._bundle.next_part(self)
                    if not buffers:
                        return
                    self._buffers = buffers
                count, self._buffers = send_some(self.socket, self._buffers)
                bytes_left -= count
        except BlockingIOError:
            pass
        except OSError as error:
            self._bundle.end(f"broke: {error}")
            return
        self.wake()

    def _on_writable(self) -> bool:
        if not self._bundle.has_ended:
            self.write()
        return False  # `write` has had it watched again if it has to

    def _on_readable(self) -> bool:
        """Handles the end of the connection, by which the peer sends nothing."""
        try:
            received = self.socket.recv_into(bytearray(1))
        except BlockingIOError:
            return True  # what has arrived is only for the TLS library
        except OSError as error:
            self._bundle.end(f"broke: {error}")
        else:
            self._bundle.end("carries bytes in the wrong direction" if received else "was closed by the peer")
        return False


_bundles_here: "weakref.WeakSet[SendingBundle]" = weakref.WeakSet()
"""Of all agents of this process, for a fork."""


def _end_in_child() -> None:
    """Keeps a forked child from writing into the sockets that it shares with its parent."""
    for bundle in list(_bundles_here):
        bundle.has_ended = True


at_fork(in_child=_end_in_child)


@final
class _ExpectedPayload:
    """A payload that an envelope has announced and that is not complete."""

    __slots__ = ("data", "future", "missing", "nbytes", "started")

    def __init__(self, nbytes: int, data: memoryview | None) -> None:
        self.nbytes = nbytes
        self.data = data
        """Its memory; None if it is not wanted."""
        self.future: Arriving = Arriving()
        self.started: set[int] = set()
        """The parts that have arrived, or are being read."""
        self.missing = count_parts(nbytes)
        """The number of parts that have not arrived."""

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it is cancelled
            self.future.set_exception(error)


@final
class _Part:
    """A part that is being read."""

    __slots__ = ("left", "memory", "payload", "transfer_id")

    def __init__(self, transfer_id: int, payload: _ExpectedPayload, number: int) -> None:
        """Raises ValueError if the payload has no such part."""
        start, end = range_of_part(number, payload.nbytes)
        self.transfer_id = transfer_id
        self.payload = payload
        self.left = end - start
        self.memory = None if payload.data is None else payload.data[start:end]

    def read(self, connection: AnySocket) -> int:
        """Reads what has arrived of it; returns how many bytes. Raises BlockingIOError if there is nothing."""
        if self.memory is not None:
            count = connection.recv_into(self.memory[-self.left :])
        else:
            count = connection.recv_into(bytearray(min(self.left, DROP_BYTES)))
        self.left -= count
        return count


@final
class ReceivingBundle:
    """The connections by which one peer sends payloads, and the payloads that it has announced for them.

    All of it ends when one of the connections does. Safe to use from any thread.
    """

    def __init__(
        self,
        executor: Executor,
        allocate: Callable[[int], memoryview],
        on_end: Callable[[], object],
        on_malformed: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        """Has no connections yet.

        `allocate` returns memory of so many bytes, or raises RuntimeError. On any thread, `on_end` is called once,
        when nothing more can be received, and `on_malformed` when the peer has sent bytes that are no payload.
        """
        self._executor = executor
        self._allocate = allocate
        self._on_end = on_end
        self.on_malformed = on_malformed
        self._lock = threading.Lock()
        self._connections: list[_ReceivingConnection] = []
        self._payloads: dict[int, _ExpectedPayload] = {}
        """By transfer id."""
        self._waiting: dict[int, list[_ReceivingConnection]] = {}
        """Connections that are not read until a payload is announced, by its transfer id."""
        self._failure: Exception | None = None

    def add(self, connection: AnySocket) -> None:
        """Takes over a connection, and reads it from now on."""
        added = _ReceivingConnection(connection, self, self._executor)
        with self._lock:
            if self._failure is None:
                self._connections.append(added)
                added.start()

    def expect(self, transfer_id: int, nbytes: int) -> Arriving:
        """Allocates memory for a payload, and returns a future of it.

        Raises ValueError if it has been announced before, and RuntimeError if there is no memory for it.
        """
        payload = _ExpectedPayload(nbytes, self._allocate(nbytes))
        self._announce(transfer_id, payload)
        return payload.future

    def discard(self, transfer_id: int, nbytes: int) -> None:
        """Drops a payload, before or after `expect`: its bytes are read and forgotten."""
        with self._lock:
            known = self._payloads.get(transfer_id)
            if known is not None:
                known.data = None
        if known is not None:
            known.future.cancel()
        else:
            self._announce(transfer_id, _ExpectedPayload(nbytes, None))
        if len(self._payloads) > 2 * MAX_ANNOUNCED:
            self.fail(PayloadLostError("it announces payloads that it does not send"))

    def fail(self, error: Exception) -> None:
        """Ends all connections, and fails the payloads that have not arrived."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            payloads, self._payloads = self._payloads, {}
            connections, self._connections = self._connections, []
            self._waiting = {}
        for connection in connections:
            connection.end()
        self._on_end()
        for payload in payloads.values():
            payload.fail(error)

    def _announce(self, transfer_id: int, payload: _ExpectedPayload) -> None:
        waiting: list[_ReceivingConnection] = []
        with self._lock:
            if transfer_id in self._payloads:
                raise ValueError(f"transfer {transfer_id} was announced twice")
            failure = self._failure
            if failure is None:
                self._payloads[transfer_id] = payload
                waiting = self._waiting.pop(transfer_id, waiting)
        if failure is not None:
            payload.fail(failure)
        for connection in waiting:
            connection.resume()

    # Called by the threads that read.

    def start_part(self, transfer_id: int, number: int, connection: "_ReceivingConnection") -> _Part | None:
        """Returns a part whose header has been read; None if its payload has to be announced before one reads on.

        Raises ValueError if the payload has no such part, or it has been sent before.
        """
        with self._lock:
            payload = self._payloads.get(transfer_id)
            if payload is None:
                if self._failure is None:
                    self._waiting.setdefault(transfer_id, []).append(connection)
                return None
            part = _Part(transfer_id, payload, number)
            if number in payload.started:
                raise ValueError(f"part {number} of transfer {transfer_id} was sent twice")
            payload.started.add(number)
            return part

    def end_part(self, part: _Part) -> bool:
        """Handles a part that has been read; returns whether its payload is complete."""
        payload = part.payload
        with self._lock:
            payload.missing -= 1
            if payload.missing:
                return False
            self._payloads.pop(part.transfer_id, None)
            data = payload.data
        if data is not None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has failed
                payload.future.set_result(data)
        return True


@final
class _ReceivingConnection:
    """One connection of a bundle. Used by the bundle, and by one thread at a time that reads.

    Its socket is closed when nothing refers to it any more, so not while a thread uses it.
    """

    def __init__(self, connection: AnySocket, bundle: ReceivingBundle, executor: Executor) -> None:
        connection.settimeout(0)
        self._socket = connection
        self._bundle = bundle
        self._executor = executor
        self._header = bytearray(HEADER_BYTES)
        self._header_filled = 0
        """Bytes of the header that have been read."""
        self._part: _Part | None = None
        """The part that is being read; None before its header is complete, and its payload announced."""
        self._low_water = 1

    def __del__(self) -> None:
        self._socket.close()

    def start(self) -> None:
        self._executor.watch(self._socket.fileno(), READABLE, self._on_readable)

    def resume(self) -> None:
        """Has it read again. Called while nobody reads it."""
        self._set_low_water()
        poller, descriptor = self._executor.poller, self._socket.fileno()
        if isinstance(self._socket, TlsSocket) and self._socket.has_unread():
            poller.hand_over(descriptor, self._on_readable)
        else:
            poller.watch_again(descriptor)

    def end(self) -> None:
        self._executor.poller.unwatch(self._socket.fileno())
        with contextlib.suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def _on_readable(self) -> bool:
        try:
            if self._read():
                self.resume()
        except ValueError as error:
            self._bundle.on_malformed(error)
            self._bundle.fail(PayloadLostError(f"it sent malformed bytes on a bulk connection: {error}"))
        except OSError as error:
            how = f"broke: {error}" if str(error) else "closed"
            self._bundle.fail(PayloadLostError(f"its connection for large payloads {how}"))
        except Exception as error:
            log.exception("a payload cannot be received")
            self._bundle.fail(PayloadLostError(f"its connection for large payloads failed: {error!r}"))
        return False  # `resume` has had it watched again, so that another thread may be reading by now

    def _read(self) -> bool:
        """Reads what has arrived, up to TURN_BYTES, or to the end of a payload: this thread may run its message.

        Returns:
            Whether the connection is to be read on; False if a payload has to be announced first. Then another
            thread may be reading by now.
        """
        bytes_left = TURN_BYTES
        try:
            while bytes_left > 0:
                part = self._part
                if part is None:
                    self._read_header()
                    part = self._bundle.start_part(*unpack_header(self._header), self)
                    if part is None:
                        return False
                    self._header_filled = 0
                    self._part = part
                count = part.read(self._socket)
                if not count:
                    raise ConnectionResetError
                bytes_left -= count
                if not part.left:
                    self._part = None
                    if self._bundle.end_part(part):
                        break
                elif part.memory is not None:  # all that has arrived was read
                    break
        except BlockingIOError:
            pass
        return True

    def _read_header(self) -> None:
        while self._header_filled < HEADER_BYTES:
            count = self._socket.recv_into(memoryview(self._header)[self._header_filled :])
            if not count:
                raise ConnectionResetError
            self._header_filled += count

    def _set_low_water(self) -> None:
        """Has epoll wait until all of the part has arrived, as each wake-up takes longer than it saves.

        The kernel wakes earlier if its buffers are full.
        """
        wanted = 1 if self._part is None else self._part.left
        if wanted != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._low_water = wanted
