"""Who is at the other end of a connection beside the gRPC stream."""

import contextlib
import os
import socket
import struct

from .addresses import format_address

__all__ = ["address_of_peer", "has_left", "is_of_same_user", "process_of_peer", "since_received_s"]

_CREDENTIALS = struct.Struct("3i")
"""The layout of SO_PEERCRED: process, user and group."""


_SINCE_RECEIVED = struct.Struct("52xI")
"""The beginning of tcp_info, to tcpi_last_data_recv: milliseconds since data came last."""


def address_of_peer(connection: socket.socket) -> str:
    """Returns where a connection comes from: for a unix socket, the process and its user."""
    if connection.family == socket.AF_UNIX:
        process, user, _ = _credentials_of_peer(connection)
        return f"unix:pid={process},uid={user}"
    with contextlib.suppress(OSError):  # it has gone
        return format_address(*connection.getpeername()[:2])
    return ""


def has_left(error: OSError) -> bool:
    """Returns whether an error says that the other end has closed the connection."""
    return isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)


def is_of_same_user(connection: socket.socket) -> bool:
    """Returns whether the other end of a unix socket belongs to this process's user; True for other sockets."""
    if connection.family != socket.AF_UNIX:
        return True
    _, user, _ = _credentials_of_peer(connection)
    return user == os.geteuid()


def process_of_peer(connection: socket.socket) -> int:
    """Returns the process at the other end of a unix socket, or that listens; 0 if it is in another namespace."""
    return _credentials_of_peer(connection)[0]


def since_received_s(connection: socket.socket) -> float:
    """Returns for how many seconds no data has come by a TCP connection. Raises OSError."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SINCE_RECEIVED.size)
    return float(_SINCE_RECEIVED.unpack(info)[0] / 1e3)


def _credentials_of_peer(connection: socket.socket) -> tuple[int, int, int]:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(credentials)
    return process, user, group
