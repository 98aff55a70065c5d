"""TCPStore: a key-value store that one process, the master, hosts, and that others use over gRPC.

The master has the server in its process, and calls it directly.
"""

import os
import socket
import threading
from collections.abc import Mapping
from typing import ClassVar, Self, final

from ...errors import StoreError
from ...net.addresses import allows_insecure, host_for_listening, require_trusted
from ...net.event_loop import EventLoop, acquire_event_loop
from ...net.security import Credentials
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from .limits import StoreLimits
from .remote import ANSWER_TIMEOUT_S, RemoteServer
from .server import StoreServer

__all__ = ["TCPStore"]


@final
class TCPStore(Store):
    """A store that one process, the master, hosts. Every process that knows the master's address can use it.

    At a loopback address, without credentials and `insecure`, only processes of the master's user on its host can.

    When the master closes the store or dies, operations of other processes fail at once with a StoreNetworkError.
    A store that is a process of its own (`gradwire store`) may die and be started again: operations wait
    for it, and are done once.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,  # noqa: ARG002  # torch's argument
        *,
        insecure: bool = False,
        credentials: Credentials | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        """Hosts the store, or connects to it, retrying until the master answers.

        Args:
            host_name: the master's host name or address. The master listens on this address only, except if
                it is a name other than localhost that resolves to a loopback address on the master's host (as on
                Debian): then, with credentials or `insecure`, it listens on all addresses.
            port: the master's port, 1 to 65535. On the master, 0 chooses a free port.
            world_size: the number of processes that will use the store, the master included; None if unknown.
            is_master: whether this process hosts the store.
            timeout: how long this constructor, and by default operations that wait for keys, may wait: a timedelta
                or seconds.
            wait_for_workers: whether the master waits until `world_size` processes have connected; has no effect
                if `world_size` is None.
            multi_tenant: whether masters in this process share one store if they have the same port. They must
                give the same host, credentials and limits; the `world_size` of the first one counts.
            master_listen_fd: file descriptor of a listening socket. The master closes the socket, and listens on
                its port.
            use_libuv: ignored, since the server is always gRPC's; accepted for compatibility with torch.
            insecure: allows an address that is not a loopback address, without credentials; at a loopback address,
                lets in other users of the host.
            credentials: what all processes of the store recognize each other by, on encrypted connections. By
                default those in the environment: see Credentials.from_environment.
            limits: what the master holds at most; None for the defaults of StoreLimits, or on a shared master for
                those of its first user.

        Raises:
            StoreNetworkError: the port is in use, or no store answers within `timeout`.
            StoreError: not all processes connected within `timeout`, `host_name` cannot be resolved, or the
                address needs credentials or `insecure`, or the master has other credentials.
            CredentialsError: the credentials are not valid.
            ValueError: an argument is not valid, or `master_listen_fd` is not a socket on `port`.
        """
        seconds = to_seconds(timeout)
        _check_arguments(host_name, port, world_size, is_master)
        self.credentials = credentials or Credentials.from_environment()
        self._identity = self.credentials.identity() if self.credentials is not None else None
        is_protected = insecure or self._identity is not None
        require_trusted(
            host_name, insecure=is_protected, action="hosting a store on" if is_master else "connecting to"
        )
        self._host = host_name
        self._port = port
        self.insecure = insecure
        self._connection: _HostedServer | RemoteServer
        if is_master:
            if master_listen_fd is not None:
                port = _take_over_port(master_listen_fd, port)
            make = _HostedServer.shared if multi_tenant else _HostedServer
            listen_host = host_for_listening(host_name, insecure=is_protected)
            users = world_size if wait_for_workers else None
            hosted = make(listen_host, port, users, self.credentials, limits, insecure=allows_insecure(insecure))
            self._connection, self._port = hosted, hosted.port
        else:
            self._connection = RemoteServer(host_name, port, self._identity, insecure=insecure)
        try:
            self._connection.join(seconds)
        except BaseException:
            self._connection.close()
            raise
        super().__init__(timeout)

    @property
    def host(self) -> str:
        """The master's host name or address, as given to the constructor."""
        return self._host

    @property
    def port(self) -> int:
        """The master's port."""
        return self._port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802
        """Whether the server uses torch's libuv backend: always False, since it is gRPC's."""
        return False

    def audit_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Returns how often clients have connected, been refused or reached a limit; empty if not the master.

        The counts are by listener and event, as in the table of docs/security.md: `["store"]["limit"]`.
        """
        return self._connection.audit_counts() if isinstance(self._connection, _HostedServer) else {}

    def clone(self) -> "TCPStore":
        """Opens another connection to the same master, with the same timeout, which is closed separately."""
        cloned = TCPStore.__new__(TCPStore)
        cloned._host, cloned._port, cloned.insecure = self._host, self._port, self.insecure
        cloned.credentials, cloned._identity = self.credentials, self._identity
        connection = RemoteServer(self._host, self._port, self._identity, insecure=self.insecure)
        if isinstance(self._connection, RemoteServer):
            connection.join_as(self._connection)
        connection.keep_from_children()
        cloned._connection = connection
        Store.__init__(cloned, self.timeout)
        return cloned

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        try:
            return self._connection.execute(operation, seconds, seconds or to_seconds(self.timeout))
        except StoreError:
            if self._closed:
                raise self._closed_error() from None
            raise

    def _release(self) -> None:
        self._connection.close()


def _check_arguments(host: str, port: int, world_size: int | None, is_master: bool) -> None:
    if not host:
        raise ValueError(f"host_name is {host!r}: give the master's host name or address")
    if not (0 if is_master else 1) <= port < 65536:
        free = ", or 0 for a free one" if is_master else ""
        raise ValueError(f"port is {port!r}: give 1 to 65535{free}")
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size is {world_size}: give the number of processes, or None")


def _take_over_port(listening: int, port: int) -> int:
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


@final
class _HostedServer:
    """A server in this process. A shared one stops when the last TCPStore of the process that uses it is closed.

    The arguments are those of TCPStore; `join` waits for `world_size` users, and for nobody if it is None.
    """

    _shared: ClassVar[dict[int, "_HostedServer"]] = {}
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
        """Raises StoreError if a further user was given something else."""
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
        return self._server.audit.counts()

    def close(self) -> None:
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
