"""The master's side of a TCPStore: the server, called without a detour over the network."""

import os
import socket
import threading
from typing import ClassVar, Self, final

from ...errors import StoreError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..event_loop import EventLoop, acquire_event_loop
from .server import StoreServer

__all__ = ["ANSWER_SECONDS", "Hosted", "take_over"]

ANSWER_SECONDS = 60.0
"""So long a server may take for an answer, beyond what the operation is to wait."""


@final
class Hosted:
    """A server in this process. One that is shared ends with the last of those who opened it."""

    _shared: ClassVar[dict[int, "Hosted"]] = {}
    """By port."""
    _guard: ClassVar = threading.Lock()

    def __init__(self, host: str, port: int, world_size: int | None) -> None:
        self._world_size = world_size
        self._users = 1
        self._process = os.getpid()
        self._loop: EventLoop = acquire_event_loop()
        self._server = StoreServer()
        try:
            self.port = self._loop.run(self._server.start(host, port))
        except BaseException:
            self._loop.release()
            raise

    @classmethod
    def shared(cls, host: str, port: int, world_size: int | None) -> Self:
        """The server that other stores of this process have opened in this way on this port, or else a new one."""
        with cls._guard:
            found = cls._shared.get(port)
            if found is not None and found._process == os.getpid():
                found._users += 1
                return found
            made = cls(host, port, world_size)
            cls._shared[made.port] = made
            return made

    def join(self, seconds: float) -> None:
        """Counts this user in, and waits for as many as there are to be."""
        self.execute(Operation(kind=store_pb2.JOIN), 0)
        if self._world_size is None:
            return
        if not self._loop.run(self._server.wait_joined(self._world_size, seconds)):
            raise StoreError(
                f"Timed out after {seconds:g} seconds waiting for clients. "
                f"{self._server.joined}/{self._world_size} clients joined. The master of the store on port "
                f"{self.port} counts as one: start the others, or give world_size=None"
            )

    def execute(self, operation: Operation, seconds: float) -> Outcome:
        """Runs an operation that waits for up to `seconds`."""
        try:
            return self._loop.run(self._server.execute(operation), seconds + ANSWER_SECONDS)
        except TimeoutError:
            raise StoreError(
                f"the store on port {self.port}, in this process, did not answer within "
                f"{seconds + ANSWER_SECONDS:g} s: something blocks the event loop"
            ) from None

    def close(self) -> None:
        """Ends the server, unless others in this process use it."""
        with self._guard:
            self._users -= 1
            if self._users:
                return
            if self._shared.get(self.port) is self:
                del self._shared[self.port]
        try:
            self._loop.run(self._server.stop())
        finally:
            self._loop.release()


def take_over(listening: int, port: int) -> int:
    """Closes a socket that listens, so that a server may listen in its place; the port.

    gRPC makes its own sockets. Clients that come in between try again.

    Args:
        listening: the file descriptor of the socket.
        port: the one that the caller expects; 0 if it is whichever the socket has.

    Raises:
        ValueError: it is no socket with a port, or has another one.
    """
    try:
        with socket.socket(fileno=listening) as taken:
            found = taken.getsockname()[1]
    except (OSError, IndexError) as error:
        raise ValueError(
            f"master_listen_fd is {listening}: give the descriptor of a TCP socket ({error})"
        ) from None
    if port not in (0, found):
        raise ValueError(f"master_listen_fd is a socket on port {found}, but the port is {port}: give that, or 0")
    return int(found)
