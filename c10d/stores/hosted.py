"""The master's side of a TCPStore: a server in this process, called directly instead of over the network."""

import os
import socket
import threading
from typing import ClassVar, Self, final

from ...errors import StoreError
from ...net.event_loop import EventLoop, acquire_event_loop
from ...net.security import Credentials
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .limits import StoreLimits
from .server import StoreServer

__all__ = ["ANSWER_TIMEOUT_S", "HostedServer", "take_over_port"]

ANSWER_TIMEOUT_S = 60.0
"""Seconds within which a server must answer, in addition to what the operation may wait for keys."""


@final
class HostedServer:
    """A server in this process. A shared one stops when the last TCPStore of the process that uses it is closed.

    The arguments are those of TCPStore; `join` waits for `world_size` users, and for nobody if it is None.
    """

    _shared: ClassVar[dict[int, "HostedServer"]] = {}
    """Shared servers of this process, by port."""
    _lock: ClassVar = threading.Lock()

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int | None,
        credentials: Credentials | None,
        limits: StoreLimits | None,
        *,
        insecure: bool,
    ) -> None:
        self._world_size = world_size
        self._users = 1
        self._process = os.getpid()
        self._host, self._credentials, self._limits = host, credentials, limits or StoreLimits()
        identity = credentials.identity() if credentials is not None else None
        self._loop: EventLoop = acquire_event_loop()
        self._server = StoreServer(self._limits)
        try:
            self.port = self._loop.run(self._server.start(host, port, identity, insecure=insecure))
        except BaseException:
            self._loop.release()
            raise

    @classmethod
    def shared(
        cls,
        host: str,
        port: int,
        world_size: int | None,
        credentials: Credentials | None,
        limits: StoreLimits | None,
        *,
        insecure: bool,
    ) -> Self:
        """Returns the shared server of this process on this port, and starts one if there is none.

        The `world_size` of the one that is there stays. Raises StoreError if anything else differs.
        """
        with cls._lock:
            found = cls._shared.get(port)
            if found is not None and found._process == os.getpid():
                found._check_same(host, credentials, limits)
                found._users += 1
                return found
            made = cls(host, port, world_size, credentials, limits, insecure=insecure)
            cls._shared[made.port] = made
            return made

    def _check_same(self, host: str, credentials: Credentials | None, limits: StoreLimits | None) -> None:
        """Raises StoreError if a further user was given another host, other credentials or other limits."""
        where = f"the store that this process hosts on port {self.port}"
        same = "give the same to all that share it"
        if (self._credentials is None) != (credentials is None):
            made_with = "without" if self._credentials is None else "with"
            raise StoreError(f"{where} was made {made_with} credentials: {same}")
        if self._credentials != credentials:
            raise StoreError(f"{where} was made with other credentials: {same}")
        if self._host != host:
            raise StoreError(f"{where} was made for the host {self._host!r}, not {host!r}: {same}")
        if limits is not None and self._limits != limits:
            raise StoreError(f"{where} has {self._limits}, not {limits}: {same}")

    def join(self, seconds: float) -> None:
        """Counts this user, and waits until `world_size` have joined. Raises StoreError after `seconds`."""
        self.execute(Operation(kind=store_pb2.JOIN), 0)
        if self._world_size is None:
            return
        if not self._loop.run(self._server.wait_joined(self._world_size, seconds)):
            raise StoreError(
                f"Timed out after {seconds:g} seconds waiting for clients. "
                f"{self._server.joined}/{self._world_size} clients joined. The master of the store on port "
                f"{self.port} counts as one: start the others, or give world_size=None"
            )

    def execute(self, operation: Operation, seconds: float, restart_timeout: float = 0.0) -> Outcome:  # noqa: ARG002
        """Runs an operation that may wait for `seconds`. The server is in this process, so it is never gone."""
        try:
            return self._loop.run(self._server.execute(operation), seconds + ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise StoreError(
                f"the store on port {self.port}, in this process, did not answer within "
                f"{seconds + ANSWER_TIMEOUT_S:g} s: something blocks the event loop"
            ) from None

    def audit_counts(self) -> dict[str, dict[str, int]]:
        """Returns how many events of each kind the server has recorded: see Audit."""
        return self._server.audit.counts()

    def close(self) -> None:
        """Stops the server, unless it has other users in this process."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._shared.get(self.port) is self:
                del self._shared[self.port]
        try:
            self._loop.run(self._server.stop())
        finally:
            self._loop.release()


def take_over_port(listening: int, port: int) -> int:
    """Closes a listening socket, so that a server can listen on its port, and returns the port.

    gRPC cannot use the socket itself. Clients that connect in between try again.

    Raises ValueError if the descriptor is not a socket with a port, or the port is another one; 0 stands for any.
    """
    try:
        with socket.socket(fileno=listening) as taken:
            found = taken.getsockname()[1]
    except (OSError, IndexError) as error:
        raise ValueError(
            f"master_listen_fd is {listening}: give the descriptor of a TCP socket ({error})"
        ) from None
    if port not in (0, found):
        raise ValueError(
            f"master_listen_fd is a socket on port {found}, but the port is {port}: give port={found} or 0"
        )
    return int(found)
