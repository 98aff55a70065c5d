"""The server of a TCPStore: the gRPC service gradwire.v1.Store, on the process's event loop.

A port on the loopback address is open to every user of the host, and the server would serve them all. So without
credentials it listens on a unix socket in a directory that only its user can use. The port names the socket. It is
kept from other programs of this user, but nobody listens there, and if another user has it, that does not matter.
"""

import asyncio
import errno
import os
import socket
import time
import urllib.parse
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, TypeAlias, final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ...errors import StoreError, StoreNetworkError
from ...net.addresses import ListenSettings, format_address, is_loopback, is_numeric, resolve
from ...net.inheritance import note_grpc, note_listener, why_grpc_is_unusable
from ...net.security import SHARED_HOST_NAME, Audit, Identity, grpc_certified_names
from ...net.socket_owners import users_listening
from ...net.socket_peers import MAX_ROUND_TRIP_S, half_of_descriptors
from ...net.user_sockets import (
    UNIX_SCHEME,
    SocketDirectory,
    SocketFile,
    UnsafePathError,
    store_socket_name,
)
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from .limits import MAX_BYTES, StoreLimits, parse_operation
from .state import ADDING, KeyValueState, problem_of

__all__ = [
    "CLOCK",
    "EXECUTE",
    "IDLE_TIMEOUT_S",
    "MESSAGE_OPTIONS",
    "POP",
    "SERVICE",
    "StoreServer",
    "listen_locally",
    "server_options",
]

SERVICE = "gradwire.v1.Store"
EXECUTE = f"/{SERVICE}/Execute"
POP = f"/{SERVICE}/Pop"
CLOCK = f"/{SERVICE}/Clock"

LISTENER = "store"
"""What the audit log calls it."""

HANDSHAKE_TIMEOUT_S = 2.0
"""Seconds that a new connection may take until it speaks HTTP/2, besides a round trip by the network for TLS."""

IDLE_TIMEOUT_S = 3600.0
"""Seconds after which a connection without a call in flight is closed. Clients close theirs after half of it."""

KEEPALIVE_INTERVAL_S, KEEPALIVE_TIMEOUT_S = 30.0, 90.0
"""Seconds between pings of a client, and within which it must answer. A debugger may suspend it for so long."""

MAX_CALLS_PER_CONNECTION = 1024
"""Calls in flight on one connection; the client queues further ones."""

# MAX_BYTES bounds only the keys and values of a message.
MESSAGE_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES + 4096),
    ("grpc.max_send_message_length", MAX_BYTES + 4096),
]

_SERVER_OPTIONS = [
    *MESSAGE_OPTIONS,
    ("grpc.so_reuseport", 0),  # else a second server on the same port would get half of the clients
    ("grpc.http2.max_ping_strikes", 0),  # clients' pings accumulate while this process is suspended
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
]

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_END: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
"""What reading a stream returns after its last message."""

_MAX_TIMEOUT_MS = 10**12
"""Longer waits count as this one, because clocks overflow above it."""


class _ClosingError(Exception):
    """Raised in waiting operations when the server is about to stop."""


@final
class StoreServer:
    """Runs operations for this process and its clients. An operation that waits takes a coroutine, not a thread.

    All methods must be called on the event loop.
    """

    def __init__(self, limits: StoreLimits, state: KeyValueState | None = None) -> None:
        """Args: limits: what the store holds. state: that of a store which can be started again."""
        self._limits: Final = limits
        self.audit: Final = Audit("")
        """Records who connects."""
        self._state: Final = state or KeyValueState(limits)
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        self._waiting = 0
        self._held_bytes = 0
        """Bytes of operations that wait, and of items that have been popped and whose receipt is not confirmed."""
        self._joined: dict[asyncio.Future[None], None] = {}
        self._closing = False
        self._encrypts = False
        self._server: grpc.aio.Server | None = None
        self._socket: SocketFile | None = None
        self._reserved: list[socket.socket] = []
        """Those that keep the port of a server that listens on no port."""

    @property
    def joined(self) -> int:
        """Number of clients that have joined."""
        return self._state.joined

    async def start(
        self, host: str, port: int, identity: Identity | None = None, *, insecure: bool = False
    ) -> int:
        """Listens, and returns the port; a free one if `port` is 0.

        Without an identity, processes of this host reach the server by a unix socket, which is of their user only:
        see `listen_locally`. Then it listens on a port only with `insecure`.

        The identity is what this process shows and demands on connections. `insecure` says whether everybody may
        connect who reaches the host.
        """
        # Requests are parsed by the handlers: gRPC would log the traceback of what is no Operation.
        serializer = Outcome.SerializeToString
        handlers = {
            "Execute": grpc.unary_unary_rpc_method_handler(self._serve, response_serializer=serializer),
            "Clock": grpc.unary_unary_rpc_method_handler(_serve_clock, response_serializer=serializer),
            "Pop": grpc.stream_stream_rpc_method_handler(self._serve_pop, response_serializer=serializer),
        }
        if why := why_grpc_is_unusable():
            raise StoreError(why)
        server = note_grpc(
            grpc.aio.server(
                options=server_options(self._limits, host),
                maximum_concurrent_rpcs=self._limits.max_waiting + self._limits.max_connections,
            )
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._encrypts = identity is not None
        credentials = None
        if identity is not None:
            credentials = identity.grpc_server_credentials(partial(self.audit.connect, LISTENER))
        try:
            is_local = identity is None and is_loopback(host)
            takes_port = partial(_add_port, server, credentials) if insecure or not is_local else self._reserve
            bound = _bind(takes_port, host, port)
            note_listener(self, bound, *resolve(host))
            if is_local or (identity is None and is_numeric(host) and ip_address(host).is_unspecified):
                self._socket = listen_locally(server.add_insecure_port, host, bound, insecure=insecure)
        except BaseException:
            await server.stop(None)
            self._release_addresses()
            raise
        await server.start()
        self._server = server
        return bound

    def _reserve(self, address: str, port: int) -> int:
        """Keeps a port, or a free one for 0, from other programs, without listening there. Returns the port.

        Does so too if another user has the port. Raises RuntimeError if a process of this user listens there, or
        the address, a numeric one, is none of this host.
        """
        kept = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            kept.bind((address, port))
        except OSError as error:
            kept.close()
            if error.errno != errno.EADDRINUSE or not port or _is_taken(port):
                raise RuntimeError(str(error)) from error
            return port
        self._reserved.append(kept)
        return int(kept.getsockname()[1])

    def _release_addresses(self) -> None:
        if self._socket is not None:
            self._socket.remove()
        for kept in self._reserved:
            kept.close()

    async def stop(self) -> None:
        """Makes waiting operations fail, lets the others finish, and stops listening."""
        self._closing = True
        for waiters in (*self._waiters.values(), self._joined):
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(_ClosingError())
        if self._server is not None:
            await self._server.stop(1.0)
            self._release_addresses()
        self.audit.close()

    async def execute(self, operation: Operation, context: "_Context | None" = None) -> Outcome:
        """Runs one operation, which may wait for its `timeout_ms`, for a client's call or for this process.

        Raises StoreError if the server is about to stop.
        """
        if (answer := self._answer_of(operation)) is not None:
            return answer
        deadline = asyncio.get_running_loop().time() + min(operation.timeout_ms, _MAX_TIMEOUT_MS) / 1000
        try:
            while missing := self._state.missing(operation):
                nbytes = operation.ByteSize()
                if refusal := self._why_no_wait(context) or self._why_not_held(nbytes, context):
                    return refusal
                self._waiting += 1
                self._held_bytes += nbytes
                try:
                    if not await self._wait_for_change(self._waiters.setdefault(missing[0], {}), deadline):
                        break
                finally:
                    self._waiting -= 1
                    self._held_bytes -= nbytes
        except _ClosingError:
            raise StoreError("the store is being closed by its master") from None
        finally:
            for key in operation.keys:
                if not self._waiters.get(key, True):
                    del self._waiters[key]
        outcome = self._state.apply(operation)
        self._record_limit(self._state.exceeded, context)
        if operation.kind in ADDING:
            for key in operation.keys:
                _wake_all(self._waiters.get(key, {}))
        elif operation.kind == store_pb2.JOIN:
            _wake_all(self._joined)
        return outcome

    def _why_no_wait(self, context: "_Context | None") -> Outcome | None:
        """Returns the outcome of an operation that would be one too many to wait; None if it can."""
        if self._waiting < self._limits.max_waiting:
            return None
        self._record_limit(f"max_waiting={self._limits.max_waiting}", context)
        return Outcome(error=f"{self._waiting} operations wait in the store already, its max_waiting")

    def _why_not_held(self, nbytes: int, context: "_Context | None") -> Outcome | None:
        """Returns the outcome of an operation of which so many bytes cannot be held; None if they can."""
        if self._held_bytes + nbytes <= (limit := self._limits.max_bytes):
            return None
        self._record_limit(f"max_bytes={limit}", context)
        return Outcome(error=f"too much waits in the store already: its max_bytes of {limit}")

    def _answer_of(self, operation: Operation) -> Outcome | None:
        """Returns the outcome of an operation that is not to be run: it is malformed, or has been run before."""
        if problem := problem_of(operation):
            return Outcome(error=problem)
        return self._state.answer_of(operation)

    async def wait_joined(self, count: int, seconds: float) -> bool:
        """Waits until `count` clients have joined; returns whether they have within `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            while self._state.joined < count:
                if not await self._wait_for_change(self._joined, deadline):
                    return False
        except _ClosingError:
            raise StoreError("the store was closed") from None
        return True

    async def _wait_for_change(self, waiters: dict[asyncio.Future[None], None], deadline: float) -> bool:
        """Waits among `waiters` to be woken; returns whether that happened before the deadline."""
        if self._closing:
            raise _ClosingError
        waiter = asyncio.get_running_loop().create_future()
        waiters[waiter] = None
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        finally:
            del waiters[waiter]
        return True

    async def _serve(self, request: bytes, context: _Context) -> Outcome:
        operation = await self._parse(request, context)
        if operation.kind == store_pb2.JOIN:  # the first operation of a client
            if self._encrypts:
                self.audit.authenticate(LISTENER, _address_of(context))
            else:
                self.audit.connect(LISTENER, _address_of(context))
        if operation.kind == store_pb2.QUEUE_POP:
            return Outcome(error="QUEUE_POP is an operation of the method Pop: use the same version of gradwire")
        return await self._execute(operation, context)

    async def _serve_pop(self, _: Any, context: _Context) -> None:
        """Pops an item, and puts it back if the client is gone before it has confirmed that it has the item."""
        operation = await self._parse(await context.read(), context)
        if operation.kind != store_pb2.QUEUE_POP:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the method Pop is for QUEUE_POP only")
        if (answer := self._answer_of(operation)) is not None:
            await context.write(answer)
            await context.read()
            return
        outcome = await self._execute(operation, context)
        is_received = False
        nbytes = sum(map(len, outcome.values))
        refusal = self._why_not_held(nbytes, context) if nbytes else None
        self._held_bytes += nbytes
        try:
            if refusal is not None:
                await context.write(refusal)
                return
            await context.write(outcome)
            if await context.read() is not _END:
                for item in outcome.values:
                    self._state.confirm(operation, item)
                is_received = True
        except StoreError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        finally:
            self._held_bytes -= nbytes
            if outcome.values and not is_received:
                self._state.put_back(operation, outcome.values[0])
                _wake_all(self._waiters.get(operation.keys[0], {}))

    async def _execute(self, operation: Operation, context: _Context) -> Outcome:
        try:
            return await self.execute(operation, context)
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise

    async def _parse(self, request: Any, context: _Context) -> Operation:
        if self._encrypts and SHARED_HOST_NAME not in grpc_certified_names(context.auth_context()):
            problem = f"the certificate of the client is not for {SHARED_HOST_NAME}"
            self.audit.deny(LISTENER, problem, peer=_address_of(context))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
        try:
            return parse_operation(b"" if request is _END else request)
        except DecodeError as error:
            self.audit.deny(LISTENER, error, peer=_address_of(context))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    def _record_limit(self, limit: str, context: "_Context | None") -> None:
        if limit:
            self.audit.limit(LISTENER, limit, peer=_address_of(context) if context is not None else "")
            self._state.exceeded = ""


def _address_of(context: _Context) -> str:
    return urllib.parse.unquote(context.peer())  # gRPC quotes the brackets of IPv6


async def _serve_clock(_request: bytes, _context: "_Context") -> Outcome:
    """Answers with the time of this host, in nanoseconds since 1970."""
    return Outcome(number=time.time_ns())


def server_options(limits: StoreLimits, host: str) -> list[tuple[str, int]]:
    """Returns the server's options for gRPC; the constants are read here, so that tests can change them."""
    handshake_s = HANDSHAKE_TIMEOUT_S + (0.0 if is_loopback(host) else MAX_ROUND_TRIP_S)
    return [
        *_SERVER_OPTIONS,
        ("grpc.server_handshake_timeout_ms", round(1000 * handshake_s)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_TIMEOUT_S)),
        ("grpc.keepalive_time_ms", round(1000 * KEEPALIVE_INTERVAL_S)),
        ("grpc.keepalive_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_S)),  # for a host that is gone
        ("grpc.http2.ping_timeout_ms", round(1000 * KEEPALIVE_TIMEOUT_S)),  # for a client that does not answer
        ("grpc.max_allowed_incoming_connections", half_of_descriptors(limits.max_connections)),
    ]


def _wake_all(waiters: dict[asyncio.Future[None], None]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _add_port(server: grpc.aio.Server, credentials: grpc.ServerCredentials | None, address: str, port: int) -> int:
    """Has a server listen on a port. Returns the port; raises RuntimeError if it cannot."""
    where = format_address(address, port)
    return server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)


def _bind(add: Callable[[str, int], int], host: str, port: int) -> int:
    """Takes a port on every address of `host`, and returns it; one that GRADWIRE_PORTS allows if `port` is 0.

    gRPC itself listens on whichever addresses are free. With `localhost` on a port that another program uses for
    IPv4, that would be IPv6 only, and clients would reach one program or the other. `add` takes a port on an
    address, any port for 0, and returns it; it raises RuntimeError if it cannot.
    """
    bound, problem = 0, errno.EADDRNOTAVAIL
    ports = ListenSettings.from_environment().ports
    for address in resolve(host):
        try:
            bound = add(address, bound or port) if bound or port else ports.choose(address, partial(add, address))
        except OSError as error:
            if (problem := error.errno or 0) not in _NO_SUCH_ADDRESS:
                raise StoreNetworkError(f"a store cannot listen on {address}: {error.strerror}") from error
        except RuntimeError:
            problem = _bind_errno(address, bound or port)
            if problem not in _NO_SUCH_ADDRESS:  # `localhost` may name an IPv6 address that is not set up
                bound = 0
                break
    if not bound:
        address = format_address(host, port)
        reason = f"{os.strerror(problem)} ({errno.errorcode.get(problem, problem)})"
        hint = "; the host must be an address of this machine" if problem in _NO_SUCH_ADDRESS else ""
        raise StoreNetworkError(f"a store cannot listen on {address}: {reason}{hint}")
    return bound


_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _bind_errno(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno or errno.EIO
    return errno.EIO


def listen_locally(
    listen: Callable[[str], object], host: str, port: int, *, insecure: bool = False
) -> SocketFile | None:
    """Has a server listen on a socket, by an address of gRPC. Clients find it by the port; messages name the host.

    Returns the socket's file; None if there can be none, and with `insecure` the port will do.
    """
    try:
        file = SocketFile(SocketDirectory.of_this_user(), store_socket_name(port))
        with file.claim():
            listen(f"{UNIX_SCHEME}{file.bind_path}")
    except FileExistsError as error:
        raise StoreNetworkError(
            f"a store cannot listen on {format_address(host, port)}: {os.strerror(errno.EADDRINUSE)} "
            "(EADDRINUSE): another store of this user has this port"
        ) from error
    except (UnsafePathError, TimeoutError) as error:
        if insecure:
            return None
        raise StoreError(f"a store without credentials cannot listen for this user only: {error}") from error
    return file


def _is_taken(port: int) -> bool:
    try:
        return os.geteuid() in users_listening(port)
    except OSError:
        return True
