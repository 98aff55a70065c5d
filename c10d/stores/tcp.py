"""A store in one process, reached by the others over gRPC."""

import time
from typing import Any, Protocol, final

import grpc

from ...errors import StoreError, StoreNetworkError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..addresses import format_address, host_for_listening, require_trusted
from ..waiting import wait_with_warnings
from .base import DEFAULT_TIMEOUT, Store, Timeout, to_seconds
from .hosted import ANSWER_SECONDS, Hosted, take_over
from .server import EXECUTE, MESSAGE_OPTIONS

__all__ = ["TCPStore"]

_CLIENT_OPTIONS = [
    *MESSAGE_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # an operation runs at most once
    ("grpc.use_local_subchannel_pool", 1),  # a new client does not wait out an older one's backoff
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A host that vanished without a word is noticed after half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@final
class TCPStore(Store):
    """Hosted by the master, shared by everybody who knows its address.

    When the master closes it, or dies, operations of the others fail at once with a StoreError.
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
        """Hosts the store, or connects to it, trying again until the master is there.

        Args:
            host_name: the master's name or address; the master listens on this one alone. Only with `insecure`,
                and if its host's name leads to the loopback address on the host itself (as Debian's do), it
                listens on all addresses.
            port: the master's; 0, for the master only, takes a free one.
            world_size: how many users there will be, the master included; None if that is not known.
            is_master: host it.
            timeout: how long waiting operations, and this constructor, wait.
            wait_for_workers: the master waits here until `world_size` users have connected.
            multi_tenant: several masters of this process may open the store on one port, and share it.
            master_listen_fd: a listening socket, whose place the master's server takes. It is closed.
            use_libuv: not used; the server is always gRPC's.
            insecure: allow an address that is not a loopback one, though there are no credentials.

        Raises:
            StoreNetworkError: the port is taken, or no store answers.
            StoreError: not all workers came, or the address is refused.
            ValueError: an argument that cannot be; `master_listen_fd` is no socket on `port`.
        """
        seconds = to_seconds(timeout)
        _check(host_name, port, world_size, is_master)
        require_trusted(host_name, insecure=insecure, doing="hosting a store on" if is_master else "dialling")
        self._host = host_name
        self._port = port
        self._insecure = insecure
        self._connection: _Connection
        if is_master:
            if master_listen_fd is not None:
                port = take_over(master_listen_fd, port)
            make = Hosted.shared if multi_tenant else Hosted
            listening = host_for_listening(host_name, insecure=insecure)
            hosted = make(listening, port, world_size if wait_for_workers else None)
            self._connection, self._port = hosted, hosted.port
        else:
            self._connection = _Remote(host_name, port)
        try:
            self._connection.join(seconds)
        except BaseException:
            self._connection.close()
            raise
        super().__init__(timeout)

    @property
    def host(self) -> str:
        """The master's name or address, as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """The master's port."""
        return self._port

    @property
    def libuvBackend(self) -> bool:  # noqa: N802
        """Is the server torch's, on libuv? It never is."""
        return False

    def clone(self) -> "TCPStore":
        """Another connection to the same master."""
        twin = TCPStore.__new__(TCPStore)
        twin._host, twin._port, twin._insecure = self._host, self._port, self._insecure
        twin._connection = _Remote(self._host, self._port)
        Store.__init__(twin, self.timeout)
        return twin

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
    """A way to the store's server."""

    def join(self, seconds: float) -> None:
        """Counts this user in, and waits for whom it has to wait.

        Raises:
            StoreError: they did not come within `seconds`.
        """

    def execute(self, operation: Operation, seconds: float) -> Outcome:
        """Runs an operation that waits for up to `seconds`.

        Raises:
            StoreError: the server is gone, or does not answer.
        """

    def close(self) -> None:
        """Ends it."""


@final
class _Remote:
    """The others' side."""

    def __init__(self, host: str, port: int) -> None:
        self._address = format_address(host, port)
        self._channel = grpc.insecure_channel(self._address, options=_CLIENT_OPTIONS)
        self._call = self._channel.unary_unary(
            EXECUTE,
            request_serializer=Operation.SerializeToString,
            response_deserializer=Outcome.FromString,
        )

    def join(self, seconds: float) -> None:
        began = time.monotonic()
        connected = grpc.channel_ready_future(self._channel)
        wait_with_warnings(
            lambda left: _is_done(connected, left),
            seconds,
            lambda: f"no store answers on {self._address}, where rank 0, or whoever hosts it, should be",
        )
        connected.cancel()
        left = max(0.001, began + seconds - time.monotonic())
        try:
            self._call(Operation(kind=store_pb2.JOIN), timeout=left, wait_for_ready=True)
        except grpc.RpcError as error:
            raise StoreNetworkError(
                f"no store answered on {self._address} within {seconds:g} s: connect() timed out. Is the master "
                f"running, with this address and port? ({_details(error)})"
            ) from error

    def execute(self, operation: Operation, seconds: float) -> Outcome:
        try:
            outcome: Outcome = self._call(operation, timeout=seconds + ANSWER_SECONDS)
        except grpc.RpcError as error:
            kind: type[StoreError] = StoreNetworkError
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                problem = f"did not answer within {seconds + ANSWER_SECONDS:g} s"
            elif error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                problem = f"is gone: Connection closed by peer ({_details(error)})"
            else:
                kind, problem = StoreError, f"failed ({_details(error)})"
            raise kind(f"the store on {self._address} {problem}") from error
        except ValueError as error:  # what gRPC says when another thread has closed the channel
            raise StoreError(f"the connection to {self._address} is closed") from error
        return outcome

    def close(self) -> None:
        self._channel.close()


def _is_done(future: Any, seconds: float) -> bool:
    try:
        future.result(seconds)
    except grpc.FutureTimeoutError:
        return False
    return True


def _details(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def _check(host: str, port: int, world_size: int | None, is_master: bool) -> None:
    if not host:
        raise ValueError(f"host_name is {host!r}: give the master's name or address")
    if not (0 if is_master else 1) <= port < 65536:
        free = ", or 0 for a free one" if is_master else ""
        raise ValueError(f"port is {port!r}: give 1 to 65535{free}")
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size is {world_size}: give the number of workers, or None")
