"""A worker's gRPC server and its channels to other workers, and the hello by which it accepts them.

The server listens on a unix socket or a TCP port. A worker begins each stream with a hello, which says who it is;
the handshake checks that, by its certificate too where there are credentials, before the stream is used.
"""

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import grpc
from google.protobuf.message import DecodeError

from ...net.addresses import is_loopback
from ...net.inheritance import note_grpc, note_listener, note_peer
from ...net.security import Audit, Credentials, grpc_certified_names, printable, worker_host_name
from ...net.socket_peers import MAX_ROUND_TRIP_S, half_of_descriptors
from ...net.user_sockets import UNIX_SCHEME, SocketDirectory, SocketFile
from ...proto.v1 import agent_pb2
from ..contracts.options import Liveness
from ..contracts.worker import RosterVersion, WorkerInfo
from ..wire.parsing import parse_hello
from .base import TransportListener
from .socket_frames import MAX_ENVELOPE_BYTES

__all__ = [
    "DIAL_ATTEMPTS",
    "DIAL_BACKOFF_S",
    "EXCHANGE_METHOD",
    "MAX_CONNECTION",
    "PROTOCOL",
    "TRANSFER_METHOD",
    "VOUCH_METHOD",
    "GrpcEndpoint",
    "Handshake",
    "RefusedError",
    "address_of",
    "aio",
    "client_options",
    "raise_status",
    "server_options",
    "write_frame",
]

aio: Any = grpc.aio
"""The module grpc.aio, untyped: its stubs lack `EOF`, and calls without serializers."""

_DESCRIPTOR = agent_pb2.DESCRIPTOR.services_by_name["Agent"]

SERVICE: str = _DESCRIPTOR.full_name
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"
TRANSFER_METHOD = f"/{SERVICE}/Transfer"
VOUCH_METHOD = f"/{SERVICE}/Vouch"

DIAL_ATTEMPTS = 3
"""Attempts to open a stream: more than one, as a listen queue overflows while many workers connect at once."""

DIAL_BACKOFF_S = 0.05
"""Seconds before the second attempt; doubled for each further one."""

GRACE_SECONDS = 1.0
"""Seconds that peers may take to end their streams; then the server cancels them."""

HELLO_TIMEOUT_S = 2.0
"""Seconds that a connection may take to open a stream, and a stream to say its hello; then it is closed."""

MAX_CONNECTIONS = 1 << 16
"""Connections to an agent's server, unless half of the file descriptors that the process may have are fewer."""

MAX_MESSAGE_BYTES = MAX_ENVELOPE_BYTES + (1 << 20)
"""Bytes of the largest gRPC message, a frame of envelopes or of chunks."""

UNIX_PING_S = 20.0
"""Seconds between the pings of gRPC on a unix socket, where the kernel tells of the peer's process."""

TLS_VERSION = b"TLSv1.3"

PROTOCOL = 1
"""The version of the protocol. Workers of another one are refused."""

MAX_HELLO_BYTES = 4 << 10
"""Bytes of the first message of a stream: two names and some numbers."""

MAX_SILENT = 64
"""Streams whose hello is awaited at a time; those after them wait for their turn."""

MAX_UNADMITTED = 1024
"""Streams that may wait to be admitted; further ones are turned away, and may try again."""

MAX_CONNECTION = 1 << 40
"""The greatest number of a connection: no two workers count so far, and counting on from it cannot overflow."""

MAX_REASON = 500
"""Characters of the text with which a peer is refused."""


def client_options(ping_s: float) -> list[tuple[str, int]]:
    """Returns the options of channels. Args: ping_s: seconds between pings."""
    return [*_common_options(ping_s), ("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]


def server_options(ping_s: float, round_trip_s: float) -> list[tuple[str, int]]:
    """Returns the options of a server, from the seconds between pings, and those of the longest round trip.

    A client needs one round trip for TLS, and one before it opens a stream.
    """
    # Of a connection without a stream; that of a worker always has one.
    handshake_ms = int(1000 * (HELLO_TIMEOUT_S + round_trip_s))
    return [
        *_common_options(ping_s),
        # Without it, two servers could share a port, each with half of the calls.
        ("grpc.so_reuseport", 0),
        # Pings pile up while a process is suspended (by SIGSTOP, or a sleeping laptop); that is no reason to
        # disconnect it.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", handshake_ms),
        ("grpc.max_connection_idle_ms", handshake_ms),
    ]


def _common_options(ping_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Pings show a peer that this worker's process runs, while its program holds the interpreter
        # (liveness.py), and find out that the peer's host has lost power or network, which closes no connection.
        ("grpc.keepalive_time_ms", max(1, int(1000 * ping_s))),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


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
        host = address.rpartition(":")[0].strip("[]")
        round_trip_s = 0.0 if is_loopback(host) else MAX_ROUND_TRIP_S
        server = self._make_server(server_options(self._liveness.heartbeat, round_trip_s))
        if self.identity is None:
            port = server.add_insecure_port(address)
        else:
            self._encrypts = True
            credentials = self.identity.grpc_server_credentials(partial(self.audit.connect, "agent"))
            port = server.add_secure_port(address, credentials)
        note_listener(self, port, host)
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


class RefusedError(Exception):
    """A peer is not accepted. The text is sent to it, and has what it says of itself.

    Attributes:
        code: the status of its stream; UNAVAILABLE if it may try again.
    """

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> None:
        super().__init__(printable(text, MAX_REASON))
        self.code = code


class _LeftError(RefusedError):
    """A peer has ended its stream before it has said anything."""


@final
class Handshake:
    """Makes the hello of this worker, and checks the hellos of peers. Used on the event loop only."""

    def __init__(
        self,
        group: str,
        me: WorkerInfo,
        members: Mapping[int, TransportListener],
        on_roster: Callable[[RosterVersion], Awaitable[None]],
        endpoint: GrpcEndpoint,
    ) -> None:
        """Accepts nobody before `open`.

        Args:
            group: the name of the job, the same at all of its workers.
            me: this worker.
            members: by worker id. Others may come.
            on_roster: awaited with what the sender of a hello knows of the group's log, if it is more than this
                worker does; calls `open` if there are new members. Raises RefusedError if the log is another one.
            endpoint: makes channels to peers, and knows who they are by their certificates.
        """
        self.me = me
        self.endpoint = endpoint
        self.audit = endpoint.audit
        """Records who is let in."""
        self._on_roster = on_roster
        self._reads: dict[RosterVersion, asyncio.Task[None]] = {}
        """The reads of the log that no admission waits for, by what a member has said."""
        self.hello = agent_pb2.Hello(protocol=PROTOCOL, group=group, worker_id=me.wire_id, worker_name=me.name)
        self._members = members
        self._is_open = asyncio.Event()
        self._silent = asyncio.Semaphore(MAX_SILENT)
        self._unadmitted = 0

    def open(self, version: RosterVersion) -> None:
        """Accepts the members from now on, those included whose hello has been waiting.

        This worker's hellos say the version of the log that they are known from.
        """
        if version.length:
            self.hello.roster.length, self.hello.roster.digest = version.length, version.digest
        self._is_open.set()

    async def receive(self, context: Any) -> tuple[WorkerInfo, agent_pb2.Hello]:
        """Reads the hello of a stream, and nothing else; returns it, and the worker that sent it.

        Raises RefusedError if the worker is not accepted, or says no hello in time.
        """
        peer, claimed = self.endpoint.on_stream(context), ""
        if self._unadmitted >= MAX_UNADMITTED:
            self.audit.limit("agent", f"MAX_UNADMITTED={MAX_UNADMITTED}", "streams without a hello", peer=peer)
            raise RefusedError(f"worker {self.me.name!r} is busy with others", grpc.StatusCode.UNAVAILABLE)
        self._unadmitted += 1
        try:
            hello = await self._read_hello(context)
            claimed = hello.worker_name
            worker = await self.admit(hello, context)
        except RefusedError as refusal:
            if not isinstance(refusal, _LeftError):
                self.audit.deny("agent", refusal, peer=peer, worker=claimed)
            raise
        finally:
            self._unadmitted -= 1
        self.audit.authenticate("agent", peer, worker.name)
        return worker, hello

    async def _read_hello(self, context: Any) -> agent_pb2.Hello:
        try:
            async with self._silent, asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise RefusedError(f"no hello within {HELLO_TIMEOUT_S:g} s", grpc.StatusCode.UNAVAILABLE) from None
        if first is aio.EOF:
            raise _LeftError("the stream ended without a hello")
        if len(first) > MAX_HELLO_BYTES:
            raise RefusedError(f"the hello has {len(first)} bytes, of {MAX_HELLO_BYTES} at most")
        try:
            return parse_hello(first)
        except DecodeError:
            raise RefusedError("the first message is no hello") from None

    async def admit(self, hello: agent_pb2.Hello, context: Any) -> WorkerInfo:
        """Returns the worker that sent a hello, once `open` has been called.

        Raises RefusedError if its certificate is for another worker, or it has another version of the protocol,
        belongs to another job, or is no member, or says that it is this worker.
        """
        name = f"'{printable(hello.worker_name)}'"
        if reason := self.endpoint.why_refused(context, hello.worker_name):
            raise RefusedError(f"worker {self.me.name!r} does not admit {name}: {reason}")
        if hello.protocol != PROTOCOL:
            raise RefusedError(
                f"worker {self.me.name!r} speaks protocol {PROTOCOL}, {name} speaks {hello.protocol}; "
                "install the same gradwire on both"
            )
        if hello.group != self.hello.group:
            raise RefusedError(f"worker {self.me.name!r} belongs to another job than {name}")
        if hello.connection > MAX_CONNECTION:
            raise RefusedError(
                f"worker {self.me.name!r} refuses {name}: its connection has number {hello.connection}"
            )
        if (hello.worker_id, hello.worker_name) == (self.me.wire_id, self.me.name):
            raise RefusedError(f"worker {self.me.name!r} does not admit {name}: that is itself")
        await self._is_open.wait()
        version = RosterVersion(hello.roster.length, hello.roster.digest)
        if hello.worker_id not in self._members and version.length:
            await self._on_roster(version)
        member = self._members.get(hello.worker_id)
        if member is None or member.info.name != hello.worker_name:
            raise RefusedError(f"worker {self.me.name!r} knows no {name} with id {hello.worker_id}")
        if version.length > self.hello.roster.length and version not in self._reads:
            # Not awaited: it is a member, even if the store does not answer.
            self._reads[version] = asyncio.ensure_future(self._read_roster(self._on_roster(version), version))
        return member.info

    async def _read_roster(self, reading: Awaitable[None], version: RosterVersion) -> None:
        try:
            with suppress(RefusedError):  # of a log that the store does not have, or cannot tell
                await reading
        finally:
            del self._reads[version]


async def write_frame(call: Any, data: bytes) -> None:
    """Writes a frame; raises the status of a call that has ended, as reading does."""
    try:
        await call.write(data)
    except asyncio.InvalidStateError:
        await raise_status(call)


async def raise_status(call: Any) -> None:
    """Raises the status of a call that has ended."""
    raise aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )
