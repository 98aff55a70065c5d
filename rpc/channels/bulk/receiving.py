"""The receiving end of bulk connections: payloads of one peer are read into the memory of their tensors.

The executor's threads read. A part whose payload has not been announced by an envelope stays in its socket: its
connection is not read before that, and flow control stops the sender.
"""

import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import final

from ...contracts.messages import Buffer
from ...execution.executor import Executor
from ...execution.poller import READABLE
from ...transports.tls_socket import AnySocket, TlsSocket
from ..announced import MAX_ANNOUNCED
from ..base import PayloadLostError
from .parts import HEADER_BYTES, PartHeader, count_parts, range_of_part, unpack_header

__all__ = ["ReceivingBundle"]

READ_BYTES = 4 << 20
"""Bytes after which a thread that reads a connection looks at the others."""

DROP_BYTES = 64 << 10
"""Bytes read at a time of a payload that is not wanted."""

log = logging.getLogger(__name__)


@final
class _Payload:
    """A payload that an envelope has announced and that is not complete."""

    __slots__ = ("data", "future", "missing", "nbytes", "started")

    def __init__(self, nbytes: int, data: memoryview | None) -> None:
        self.nbytes = nbytes
        self.data = data
        """Its memory; None if it is not wanted."""
        self.future: concurrent.futures.Future[Buffer] = concurrent.futures.Future()
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

    def __init__(self, transfer_id: int, payload: _Payload, number: int) -> None:
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

        Args:
            executor: its threads read.
            allocate: returns memory of so many bytes. Raises RuntimeError if there is none.
            on_end: called once, on any thread, when nothing more can be received.
            on_malformed: called on any thread with the error when the peer has sent bytes that are no payload.
        """
        self._executor = executor
        self._allocate = allocate
        self._on_end = on_end
        self.on_malformed = on_malformed
        self._lock = threading.Lock()
        self._connections: list[_ReceivingConnection] = []
        self._payloads: dict[int, _Payload] = {}
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

    def expect(self, transfer_id: int, nbytes: int) -> "concurrent.futures.Future[Buffer]":
        """Allocates memory for a payload, and returns a future of it.

        Raises ValueError if it has been announced before, and RuntimeError if there is no memory for it.
        """
        payload = _Payload(nbytes, self._allocate(nbytes))
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
            self._announce(transfer_id, _Payload(nbytes, None))
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

    def _announce(self, transfer_id: int, payload: _Payload) -> None:
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

    def start_part(self, header: PartHeader, connection: "_ReceivingConnection") -> _Part | None:
        """Returns the part that follows a header; None if its payload has not been announced.

        In that case, nobody reads the connection before it is.

        Raises:
            ValueError: the payload has no such part, or it has been sent before.
        """
        with self._lock:
            payload = self._payloads.get(header.transfer_id)
            if payload is None:
                if self._failure is None:
                    self._waiting.setdefault(header.transfer_id, []).append(connection)
                return None
            part = _Part(header.transfer_id, payload, header.number)
            if header.number in payload.started:
                raise ValueError(f"part {header.number} of transfer {header.transfer_id} was sent twice")
            payload.started.add(header.number)
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
        """Reads what has arrived, up to READ_BYTES, or to the end of a payload: this thread may run its message.

        Returns:
            Whether the connection is to be read on; False if a payload has to be announced first. Then another
            thread may be reading by now.
        """
        bytes_left = READ_BYTES
        try:
            while bytes_left > 0:
                part = self._part
                if part is None:
                    self._read_header()
                    part = self._bundle.start_part(unpack_header(self._header), self)
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
