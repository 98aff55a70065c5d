"""The sending end of bulk connections: payloads are written from the memory of their tensors.

All connections of a bundle take parts from one queue, each when its socket has space, and payloads take turns. So
a large payload uses all connections, and does not hold up a smaller one behind it.

The thread that sends a payload also writes, as far as the socket takes it, and threads of the executor go on when
there is space.
"""

import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ....net.inheritance import at_fork
from ...execution.executor import Executor
from ...execution.poller import READABLE, WRITABLE
from ...transports.tls_socket import AnySocket, send_some
from .parts import PART_BYTES, PartHeader, count_parts, pack_header, range_of_part

__all__ = ["SendingBundle"]

WRITE_BYTES = 4 << 20
"""Bytes after which a thread that writes to a connection looks at others."""


@final
class _Payload:
    """A payload of which parts remain to be sent."""

    __slots__ = ("count", "data", "next_number", "transfer_id")

    def __init__(self, transfer_id: int, data: memoryview) -> None:
        self.transfer_id = transfer_id
        self.data = data
        self.count = count_parts(data.nbytes)
        self.next_number = 0

    @property
    def nbytes_left(self) -> int:
        return self.data.nbytes - self.next_number * PART_BYTES

    def next_part(self) -> list[memoryview]:
        start, end = range_of_part(self.next_number, self.data.nbytes)
        header = pack_header(PartHeader(self.transfer_id, self.next_number))
        self.next_number += 1
        return [memoryview(header), self.data[start:end]]


@final
class SendingBundle:
    """The connections by which payloads go to one peer. All of it ends when one of the connections does."""

    def __init__(
        self, number: int, connections: Sequence[AnySocket], executor: Executor, on_end: Callable[[str], None]
    ) -> None:
        """Takes over connected sockets. `on_end` is called once, on any thread, with the reason of the end.

        Raises:
            OSError: there are too few file descriptors. The connections are closed.
        """
        self.number = number
        self._executor = executor
        self._on_end = on_end
        self._lock = threading.Lock()
        self._payloads: deque[_Payload] = deque()
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
            return sum(payload.nbytes_left for payload in self._payloads)

    def start(self) -> None:
        """Begins to watch the connections."""
        with self._lock:
            for connection in self._connections:
                connection.start()

    def put(self, transfer_id: int, data: memoryview) -> None:
        """Sends a payload, or drops it if the bundle has ended. Called on any thread."""
        if self.has_ended:
            return
        payload = _Payload(transfer_id, data)
        with self._lock:
            if self.has_ended:
                return
            self._payloads.append(payload)
        connections = self._take_idle(payload.count)
        for connection in connections[1:]:
            connection.wake()
        if connections:
            connections[0].write()

    def _take_idle(self, count: int) -> "list[_SendingConnection]":
        """Takes up to `count` connections that wait for a payload."""
        taken: list[_SendingConnection] = []
        with contextlib.suppress(IndexError):
            while len(taken) < count:
                taken.append(self._idle.pop())
        return taken

    def next_part(self, connection: "_SendingConnection") -> list[memoryview]:
        """Takes the next part from the queue: its header, and its bytes.

        Returns an empty list if there is none. Then the connection is idle, and another thread may write to it.
        """
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
        """Writes parts, until there are none, the socket is full, or WRITE_BYTES are written."""
        bytes_left = WRITE_BYTES
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
