"""Logs by what each worker is connected, in one line."""

import logging

from ...net.socket_peers import address_of_peer
from ...net.user_sockets import UNIX_SCHEME
from ..contracts.worker import WorkerInfo
from .grpc_endpoint import Handshake
from .tls_socket import AnySocket, TlsSocket

__all__ = ["log_connection"]

log = logging.getLogger(__name__)


def log_connection(handshake: Handshake, peer: WorkerInfo, way: AnySocket | str) -> None:
    """Logs a connection that has been made, at level INFO.

    Its `way` is the socket that carries the envelopes; or, if gRPC does, the address of the peer's server.
    """
    if log.isEnabledFor(logging.INFO):
        me = handshake.me.name
        log.info("worker %s is connected with worker %s by %s", me, peer.name, _text(handshake, way))


def _text(handshake: Handshake, way: AnySocket | str) -> str:
    if isinstance(way, TlsSocket):
        return f"TCP with TLS ({way.peer_address()})"
    address = way if isinstance(way, str) else address_of_peer(way)
    carrier = "gRPC" if isinstance(way, str) else "TCP"
    if address.startswith(UNIX_SCHEME):
        on = "gRPC on a unix socket" if isinstance(way, str) else "a unix socket"
        return f"{on} ({address.removeprefix(UNIX_SCHEME)})"
    has_tls = isinstance(way, str) and handshake.endpoint.identity is not None
    return f"{carrier} {'with' if has_tls else 'without'} TLS ({address})"
