"""Names and options of gRPC that all connections of an agent share."""

from typing import Any

import grpc

from ...proto.v1 import agent_pb2

__all__ = [
    "CLIENT_OPTIONS",
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
    "SERVER_OPTIONS",
    "SERVICE",
    "TRANSFER_METHOD",
    "VOUCH_METHOD",
    "aio",
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

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Pings find out that a peer's host has lost power or network, which closes no connection.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Without it, two servers could share a port, each with half of the calls.
    ("grpc.so_reuseport", 0),
    # Pings pile up while a process is suspended (by SIGSTOP, or a sleeping laptop); do not disconnect it for that.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", int(HELLO_TIMEOUT_S * 1000)),
    # Of a connection without a stream; that of a worker always has one.
    ("grpc.max_connection_idle_ms", int(HELLO_TIMEOUT_S * 1000)),
]
