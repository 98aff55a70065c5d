"""Names and options of gRPC that all connections of an agent share."""

from typing import Any

import grpc

from ...proto.v1 import agent_pb2

__all__ = [
    "DIAL_ATTEMPTS",
    "DIAL_BACKOFF_S",
    "DRAIN_SECONDS",
    "DUPLICATE_TIMEOUT_S",
    "EXCHANGE_METHOD",
    "FAREWELL_DIALS",
    "GRACE_SECONDS",
    "HELLO_TIMEOUT_S",
    "MAX_CONNECTIONS",
    "MAX_ENVELOPE_BYTES",
    "MAX_MESSAGE_BYTES",
    "SERVICE",
    "TRANSFER_METHOD",
    "UNIX_PING_S",
    "VOUCH_METHOD",
    "aio",
    "client_options",
    "server_options",
]

aio: Any = grpc.aio
"""The module grpc.aio, untyped: its stubs lack `EOF`, and calls without serializers."""

DIAL_ATTEMPTS = 3
"""Attempts to open a stream: more than one, as a listen queue overflows while many workers connect at once."""

DIAL_BACKOFF_S = 0.05
"""Seconds before the second attempt; doubled for each further one."""

DRAIN_SECONDS = 5.0
"""Seconds that a closing worker waits for its peers to receive what is queued for them."""

GRACE_SECONDS = 1.0
"""Seconds that peers may take to end their streams; then the server cancels them."""

DUPLICATE_TIMEOUT_S = 5.0
"""Seconds to wait for the stream that a peer said it is opening, before opening one again."""

HELLO_TIMEOUT_S = 2.0
"""Seconds that a connection may take to open a stream, and a stream to say its hello; then it is closed."""

FAREWELL_DIALS = 16
"""The number of unconnected workers that a failing worker dials to say goodbye."""

MAX_CONNECTIONS = 1 << 16
"""Connections to an agent's server, unless half of the file descriptors that the process may have are fewer."""

_DESCRIPTOR = agent_pb2.DESCRIPTOR.services_by_name["Agent"]

SERVICE: str = _DESCRIPTOR.full_name
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"
TRANSFER_METHOD = f"/{SERVICE}/Transfer"
VOUCH_METHOD = f"/{SERVICE}/Vouch"

MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of the largest gRPC message, a frame of envelopes or of chunks."""

MAX_ENVELOPE_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Bytes of the largest envelope. Large payloads are not in it: only hundreds of thousands of tensors fill one."""

UNIX_PING_S = 20.0
"""Seconds between the pings of gRPC on a unix socket, where the kernel tells of the peer's process."""


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
