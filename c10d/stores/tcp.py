"""TCPStore: a key-value store that one process, the master, hosts, and that others use over gRPC."""

from collections.abc import Mapping
from typing import final

from ...errors import StoreError
from ...net.addresses import allows_insecure, host_for_listening, require_trusted
from ...net.security import Credentials
from ...proto.v1.store_pb2 import Operation, Outcome
from .base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from .hosted import HostedServer, take_over_port
from .limits import StoreLimits
from .remote import RemoteServer

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
        self._connection: HostedServer | RemoteServer
        if is_master:
            if master_listen_fd is not None:
                port = take_over_port(master_listen_fd, port)
            make = HostedServer.shared if multi_tenant else HostedServer
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
        return self._connection.audit_counts() if isinstance(self._connection, HostedServer) else {}

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
    """Raises ValueError if an argument of TCPStore's constructor is not valid."""
    if not host:
        raise ValueError(f"host_name is {host!r}: give the master's host name or address")
    if not (0 if is_master else 1) <= port < 65536:
        free = ", or 0 for a free one" if is_master else ""
        raise ValueError(f"port is {port!r}: give 1 to 65535{free}")
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size is {world_size}: give the number of processes, or None")
