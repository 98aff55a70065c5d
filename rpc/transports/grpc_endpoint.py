"""A worker's gRPC server, on a unix socket or a TCP port, and its channels to other workers."""

import urllib.parse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import grpc

from ...net.addresses import is_loopback
from ...net.inheritance import note_grpc, note_listener, note_peer
from ...net.security import Audit, Credentials, grpc_certified_names, printable, worker_host_name
from ...net.socket_peers import MAX_ROUND_TRIP_S, half_of_descriptors
from ...net.user_sockets import UNIX_SCHEME, SocketDirectory, SocketFile
from ..contracts.options import Liveness
from .settings import GRACE_SECONDS, MAX_CONNECTIONS, SERVICE, UNIX_PING_S, aio, client_options, server_options

__all__ = ["GrpcEndpoint", "address_of"]

TLS_VERSION = b"TLSv1.3"


def address_of(context: Any) -> str:
    """Returns the address at the other end of a call that the server is serving, behind its kind and a colon."""
    return urllib.parse.unquote(context.peer())  # gRPC quotes the brackets of IPv6


def _reach_nobody(address: str) -> str:
    raise ConnectionError(f"{address} is dialled before this worker listens")


@final
class GrpcEndpoint:
    """Used on the event loop only, except the constructor."""

    def __init__(self, worker: str, credentials: Credentials | None, liveness: Liveness | None = None) -> None:
        """Makes the endpoint of this worker, which does not serve yet.

        Without credentials, connections are in the clear, and anybody may make them. Raises CredentialsError if
        they are not valid, or for another worker.
        """
        self.identity = credentials.identity(worker) if credentials is not None else None
        """What this worker shows on its connections by TCP, and demands; None without credentials."""
        self.audit = Audit(worker)
        """Records who connects to this worker."""
        self._liveness = liveness or Liveness()
        self._encrypts = False
        self.reach: Callable[[str], str] = _reach_nobody
        """Returns what to dial for the address of a worker; raises OSError if it is not to be dialled."""
        self._methods: dict[str, Any] = {}
        self._server: Any = None
        self._file: SocketFile | None = None

    def serve(self, methods: dict[str, Any]) -> None:
        """Sets the handlers of the methods of the agent's gRPC service, by name."""
        self._methods = methods

    def _make_server(self, options: Sequence[tuple[str, int]]) -> Any:
        if self._server is None:  # else it could not listen on another port
            limit = ("grpc.max_allowed_incoming_connections", half_of_descriptors(MAX_CONNECTIONS))
            self._server = note_grpc(aio.server(options=[*options, limit]))
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._methods),))
        return self._server

    async def listen(self, address: str) -> int:
        """Starts the server on an address. Returns its port."""
        port: int
        is_local = is_loopback(address.rpartition(":")[0].strip("[]"))
        server = self._make_server(server_options(self._liveness.heartbeat, 0.0 if is_local else MAX_ROUND_TRIP_S))
        if self.identity is None:
            port = server.add_insecure_port(address)
        else:
            self._encrypts = True
            credentials = self.identity.grpc_server_credentials(partial(self.audit.connect, "agent"))
            port = server.add_secure_port(address, credentials)
        note_listener(self, port, address.rpartition(":")[0].strip("[]"))
        await server.start()
        return port

    async def listen_for_user(self, directory: SocketDirectory) -> str:
        """Starts the server on a unix socket that only this user can use. Returns its address."""
        server = self._make_server(server_options(UNIX_PING_S, 0.0))
        self._file = SocketFile(directory)
        server.add_insecure_port(f"{UNIX_SCHEME}{self._file.bind_path}")
        self._file.restrict()
        await server.start()
        return f"{UNIX_SCHEME}{self._file.path}"

    async def stop(self) -> None:
        """Stops serving, after some time for the peers to end their streams, and removes the socket."""
        if self._server is not None:  # else it has not listened
            await self._server.stop(GRACE_SECONDS)
        if self._file is not None:
            self._file.remove()
        self.audit.close()

    def channel(self, worker: str, address: str, **options: int) -> Any:
        """Makes a gRPC channel to a worker; with credentials, by TCP it connects to no other worker than this one.

        The address of its server may be forged. Options, besides those of all channels, have no prefix.

        Raises:
            OSError: the address is not to be dialled.
        """
        target = self.reach(address)
        is_unix = target.startswith(UNIX_SCHEME)  # a socket of this user
        ping_s = UNIX_PING_S if is_unix else self._liveness.heartbeat
        arguments: list[tuple[str, int | str]] = [*client_options(ping_s)]
        arguments += [(f"grpc.{name}", value) for name, value in options.items()]
        channel: Any
        if self.identity is None or is_unix:
            channel = aio.insecure_channel(target, options=arguments)
        else:
            arguments.append(("grpc.ssl_target_name_override", worker_host_name(worker)))
            channel = aio.secure_channel(target, self.identity.grpc_channel_credentials(), options=arguments)
        note_grpc(channel)
        if not is_unix:
            host, _, port = target.rpartition(":")
            note_peer(channel, int(port), host.strip("[]"))
        return channel

    def on_stream(self, context: Any) -> str:
        """Records a stream that a peer has opened, by the context of its call; returns the peer's address."""
        peer = address_of(context)
        if not self._encrypts:  # else its connection has been recorded
            self.audit.connect("agent", peer)
        return peer

    def why_refused(self, context: Any, worker: str) -> str:
        """Returns why the peer of a call may not be the worker that it says it is; empty if it may."""
        if not self._encrypts:
            return ""
        peer = context.auth_context()
        if peer.get("ssl_tls_version", [TLS_VERSION]) != [TLS_VERSION]:  # older gRPC does not tell it
            return "it does not use TLS 1.3"
        if worker_host_name(worker) not in grpc_certified_names(peer):
            return f"its certificate is not for worker '{printable(worker)}'"
        return ""
