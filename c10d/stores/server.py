"""The server of a TCPStore: the gRPC service gradwire.v1.Store, on the process's event loop."""

import asyncio
import errno
import os
import socket
from typing import Any, final

import grpc
import grpc.aio

from ...errors import StoreError, StoreNetworkError
from ...proto.v1 import store_pb2
from ...proto.v1.store_pb2 import Operation, Outcome
from ..addresses import format_address, resolve
from .base import MAX_BYTES
from .state import KeyValueState, may_satisfy_waiters

__all__ = ["EXECUTE", "MESSAGE_OPTIONS", "SERVICE", "StoreServer"]

SERVICE = "gradwire.v1.Store"
EXECUTE = f"/{SERVICE}/Execute"

# MAX_BYTES bounds only the keys and values of a message.
MESSAGE_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES + 4096),
    ("grpc.max_send_message_length", MAX_BYTES + 4096),
]

_SERVER_OPTIONS = [
    *MESSAGE_OPTIONS,
    ("grpc.so_reuseport", 0),  # else a second server on the same port would get half of the clients
    ("grpc.http2.max_ping_strikes", 0),  # clients' pings accumulate while this process is suspended
]


class _ClosingError(Exception):
    """Raised in waiting operations when the server is about to stop."""


@final
class StoreServer:
    """Runs operations for this process and its clients. An operation that waits takes a coroutine, not a thread.

    All methods must be called on the event loop.
    """

    def __init__(self) -> None:
        self._state = KeyValueState()
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        self._joined: dict[asyncio.Future[None], None] = {}
        self._closing = False
        self._server: grpc.aio.Server | None = None

    @property
    def joined(self) -> int:
        """Number of clients that have joined."""
        return self._state.joined

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port; a free one if `port` is 0.

        Raises:
            StoreNetworkError: the port is in use, or the host is not this machine.
        """
        handler = grpc.unary_unary_rpc_method_handler(
            self._serve,
            request_deserializer=Operation.FromString,
            response_serializer=Outcome.SerializeToString,
        )
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Execute": handler}),))
        bound = _bind(server, host, port)
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """Makes waiting operations fail, lets the others finish, and stops listening."""
        self._closing = True
        for waiters in (*self._waiters.values(), self._joined):
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(_ClosingError())
        if self._server is not None:
            await self._server.stop(1.0)

    async def execute(self, operation: Operation) -> Outcome:
        """Runs one operation, which may wait for its `timeout_ms`.

        Raises:
            StoreError: the server is about to stop.
        """
        deadline = asyncio.get_running_loop().time() + operation.timeout_ms / 1000
        try:
            while missing := self._state.missing(operation):
                if not await self._wait_for_change(self._waiters.setdefault(missing[0], {}), deadline):
                    break
        except _ClosingError:
            raise StoreError("the store is being closed by its master") from None
        finally:
            for key in operation.keys:
                if not self._waiters.get(key, True):
                    del self._waiters[key]
        outcome = self._state.apply(operation)
        if may_satisfy_waiters(operation):
            for key in operation.keys:
                _wake_all(self._waiters.get(key, {}))
        elif operation.kind == store_pb2.JOIN:
            _wake_all(self._joined)
        if (size := outcome.ByteSize()) > MAX_BYTES:
            return Outcome(error=f"a result of {size} bytes exceeds the limit of {MAX_BYTES}: ask for fewer keys")
        return outcome

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

    async def _serve(self, operation: Operation, context: "grpc.aio.ServicerContext[Any, Any]") -> Outcome:
        try:
            return await self.execute(operation)
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise


def _wake_all(waiters: dict[asyncio.Future[None], None]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Listens on every address of `host`, and returns the port.

    gRPC itself listens on whichever addresses are free. With `localhost` on a port that another program uses for
    IPv4, that would be IPv6 only, and clients would reach one program or the other.
    """
    bound, problem = 0, errno.EADDRNOTAVAIL
    for address in resolve(host):
        try:
            bound = server.add_insecure_port(format_address(address, bound or port))
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
    """Returns the errno of binding to an address, which gRPC does not report."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno or errno.EIO
    return errno.EIO
