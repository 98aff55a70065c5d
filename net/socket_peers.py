"""Who is at the other end of a connection, and how far away; what is granted before it has authenticated."""

import contextlib
import os
import resource
import socket
import struct
from typing import Any, Final

from .addresses import format_address

__all__ = [
    "MAX_ROUND_TRIP_S",
    "address_of_peer",
    "half_of_descriptors",
    "has_left",
    "is_of_same_user",
    "process_of_peer",
    "round_trip_s",
    "since_received_s",
]

MAX_ROUND_TRIP_S: Final = 5.0
"""Seconds of the longest round trip for which a connection gets more time to show who it is."""

_CREDENTIALS = struct.Struct("3i")
"""The layout of SO_PEERCRED: process, user and group."""

_SINCE_RECEIVED = struct.Struct("52xI")
"""The beginning of tcp_info, to tcpi_last_data_recv: milliseconds since data came last."""

_ROUND_TRIP = struct.Struct("68xI")
"""The beginning of tcp_info, to tcpi_rtt: microseconds of a round trip."""


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
    return _tcp_info(connection, _SINCE_RECEIVED) / 1e3


def round_trip_s(connection: Any) -> float:
    """Returns how many seconds a round trip by a connection has taken, but MAX_ROUND_TRIP_S at most.

    Args:
        connection: a connected socket, or what asyncio has in place of one; 0 is returned if it is no TCP socket.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # it has gone
            return min(MAX_ROUND_TRIP_S, _tcp_info(connection, _ROUND_TRIP) / 1e6)
    return 0.0


def half_of_descriptors(most: int) -> int:
    """Returns `most`, or half of the file descriptors that this process may have if that is less."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if descriptors == resource.RLIM_INFINITY else min(most, max(1, descriptors // 2))


def _tcp_info(connection: Any, layout: struct.Struct) -> int:
    (value,) = layout.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, layout.size))
    return int(value)


def _credentials_of_peer(connection: socket.socket) -> tuple[int, int, int]:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(credentials)
    return process, user, group
