"""gRPC as all of an agent's connections use it."""

from typing import Any

import grpc

from ...proto.v1 import agent_pb2

__all__ = [
    "CLIENT_OPTIONS",
    "EXCHANGE_METHOD",
    "MAX_ENVELOPE_BYTES",
    "MAX_MESSAGE_BYTES",
    "SERVER_OPTIONS",
    "SERVICE",
    "TRANSFER_METHOD",
    "aio",
]

aio: Any = grpc.aio
"""Untyped: the stubs that exist for grpc.aio know neither EOF nor calls without serializers."""

_DESCRIPTOR = agent_pb2.DESCRIPTOR.services_by_name["Agent"]

SERVICE: str = _DESCRIPTOR.full_name
EXCHANGE_METHOD = f"/{SERVICE}/Exchange"
TRANSFER_METHOD = f"/{SERVICE}/Transfer"

MAX_MESSAGE_BYTES = 64 << 20
"""The largest frame or chunk that gRPC takes."""

MAX_ENVELOPE_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Payloads are chunked long before, so only envelopes with hundreds of thousands of tensors come near."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A host that vanishes closes no connection: ping it.
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
    # A port that is taken is an error, not half of the calls going elsewhere.
    ("grpc.so_reuseport", 0),
    # Pings pile up while a process is suspended (SIGSTOP, a laptop that sleeps): no reason to break with it.
    ("grpc.http2.max_ping_strikes", 0),
]
