"""TCPStore: a key-value store that one process, the master, hosts, and that others use over gRPC."""

import time
from typing import Any, Protocol, final

import grpc

from ...errors import StoreError, StoreNetworkError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..addresses import format_address, host_for_listening, require_trusted
from ..waiting import wait_with_warnings
from .base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from .hosted import ANSWER_TIMEOUT_S, HostedServer, take_over_port
from .server import EXECUTE, MESSAGE_OPTIONS

__all__ = ["TCPStore"]

_CLIENT_OPTIONS = [
    *MESSAGE_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # a retry could run an operation twice
    # One connection per client: with a shared one, a new client would wait for the backoff of an older client.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # An operation in flight fails about 30 s after the master's host has become unreachable.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@final
class TCPStore(Store):
    """A store that one process, the master, hosts. Every process that knows the master's address can use it.

    When the master closes the store or dies, operations of other processes fail at once with a StoreNetworkError.
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
    ) -> None:
        """Hosts the store, or connects to it, retrying until the master answers.

        Args:
            host_name: the master's host name or address. The master listens on this address only, except with
                `insecure` if the name resolves to a loopback address on the master's host (as on Debian): then it
                listens on all addresses.
            port: the master's port, 1 to 65535. On the master, 0 chooses a free port.
            world_size: the number of processes that will use the store, the master included; None if unknown.
            is_master: whether this process hosts the store.
            timeout: how long this constructor, and by default operations that wait for keys, may wait: a timedelta
                or seconds.
            wait_for_workers: whether the master waits until `world_size` processes have connected; has no effect
                if `world_size` is None.
            multi_tenant: whether masters in this process share one store if they have the same port.
            master_listen_fd: file descriptor of a listening socket. The master closes the socket, and listens on
                its port.
            use_libuv: ignored, since the server is always gRPC's; accepted for compatibility with torch.
            insecure: allows an address that is not a loopback address, without credentials.

        Raises:
            StoreNetworkError: the port is in use, or no store answers within `timeout`.
            StoreError: not all processes connected within `timeout`, `host_name` cannot be resolved, or the
                address needs `insecure`.
            ValueError: an argument is not valid, or `master_listen_fd` is not a socket on `port`.
        """
        seconds = to_seconds(timeout)
        _check_arguments(host_name, port, world_size, is_master)
        require_trusted(
            host_name, insecure=insecure, action="hosting a store on" if is_master else "connecting to"
        )
        self._host = host_name
        self._port = port
        self._insecure = insecure
        self._connection: _Connection
        if is_master:
            if master_listen_fd is not None:
                port = take_over_port(master_listen_fd, port)
            make = HostedServer.shared if multi_tenant else HostedServer
            listen_host = host_for_listening(host_name, insecure=insecure)
            hosted = make(listen_host, port, world_size if wait_for_workers else None)
            self._connection, self._port = hosted, hosted.port
        else:
            self._connection = _RemoteServer(host_name, port)
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

    def clone(self) -> "TCPStore":
        """Opens another connection to the same master, with the same timeout, which is closed separately."""
        cloned = TCPStore.__new__(TCPStore)
        cloned._host, cloned._port, cloned._insecure = self._host, self._port, self._insecure
        cloned._connection = _RemoteServer(self._host, self._port)
        Store.__init__(cloned, self.timeout)
        return cloned

    def _execute(self, operation: Operation, seconds: float) -> Outcome:
        try:
            return self._connection.execute(operation, seconds)
        except StoreError:
            if self._closed:
                raise self._closed_error() from None
            raise

    def _release(self) -> None:
        self._connection.close()


class _Connection(Protocol):
    """A connection to the store's server: a `_RemoteServer`, or on the master a `HostedServer`."""

    def join(self, seconds: float) -> None:
        """Registers this process as a user of the store; on the master, waits for the expected number of users.

        Args:
            seconds: how long to wait for the server and the other users.

        Raises:
            StoreError: the server did not answer, or the other users did not join, within `seconds`.
        """

    def execute(self, operation: Operation, seconds: float) -> Outcome:
        """Runs an operation on the server, and returns its outcome.

        Args:
            operation: the operation.
            seconds: how long the operation may wait for keys; the answer may take `ANSWER_TIMEOUT_S` longer.

        Raises:
            StoreError: the server has ended or does not answer, or the connection is closed.
        """

    def close(self) -> None:
        """Closes the connection; on the master, stops the server after its last user in this process."""


@final
class _RemoteServer:
    """A gRPC connection to the server in another process."""

    def __init__(self, host: str, port: int) -> None:
        self._address = format_address(host, port)
        self._channel = grpc.insecure_channel(self._address, options=_CLIENT_OPTIONS)
        self._call = self._channel.unary_unary(
            EXECUTE,
            request_serializer=Operation.SerializeToString,
            response_deserializer=Outcome.FromString,
        )

    def join(self, seconds: float) -> None:
        started = time.monotonic()
        connected = grpc.channel_ready_future(self._channel)
        # The result is not needed: if no connection was made in time, the JOIN below fails.
        wait_with_warnings(
            lambda interval: _wait_for_future(connected, interval),
            seconds,
            lambda: f"no store answers on {self._address}, where rank 0 or another process should host it",
        )
        connected.cancel()
        remaining = max(0.001, started + seconds - time.monotonic())
        try:
            self._call(Operation(kind=store_pb2.JOIN), timeout=remaining, wait_for_ready=True)
        except grpc.RpcError as error:
            raise StoreNetworkError(
                f"no store answered on {self._address} within {seconds:g} s: connect() timed out. Is the master "
                f"running, with this address and port? ({_details(error)})"
            ) from error

    def execute(self, operation: Operation, seconds: float) -> Outcome:
        try:
            outcome: Outcome = self._call(operation, timeout=seconds + ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            kind: type[StoreError] = StoreNetworkError
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                problem = f"did not answer within {seconds + ANSWER_TIMEOUT_S:g} s"
            elif error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                problem = f"is gone: Connection closed by peer ({_details(error)})"
            else:
                kind, problem = StoreError, f"failed ({_details(error)})"
            raise kind(f"the store on {self._address} {problem}") from error
        except ValueError as error:  # raised by gRPC after another thread has closed the channel
            raise StoreError(f"the connection to {self._address} is closed") from error
        return outcome

    def close(self) -> None:
        self._channel.close()


def _wait_for_future(future: Any, seconds: float) -> bool:
    """Waits at most `seconds` for a gRPC future; returns whether it is done."""
    try:
        future.result(seconds)
    except grpc.FutureTimeoutError:
        return False
    return True


def _details(error: grpc.RpcError) -> str:
    """Returns the status code and the message of a gRPC error."""
    return f"{error.code().name}: {error.details()}"


def _check_arguments(host: str, port: int, world_size: int | None, is_master: bool) -> None:
    """Raises ValueError if an argument of TCPStore's constructor is not valid."""
    if not host:
        raise ValueError(f"host_name is {host!r}: give the master's host name or address")
    if not (0 if is_master else 1) <= port < 65536:
        free = ", or 0 for a free one" if is_master else ""
        raise ValueError(f"port is {port!r}: give 1 to 65535{free}")
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size is {world_size}: give the number of processes, or None")
