"""What a listener grants to connections that have not authenticated: how many there may be, and how much time."""

import contextlib
import resource
import socket
import struct
from typing import Any, Final

__all__ = ["MAX_ROUND_TRIP_S", "half_of_descriptors", "round_trip_s"]

MAX_ROUND_TRIP_S: Final = 5.0
"""Seconds of the longest round trip for which a connection gets more time to show who it is."""

_ROUND_TRIP: Final = struct.Struct("68xI")
"""The beginning of tcp_info, to tcpi_rtt: microseconds of a round trip."""


def round_trip_s(connection: Any) -> float:
    """Returns how many seconds a round trip by a connection has taken, but MAX_ROUND_TRIP_S at most.

    Args:
        connection: a connected socket, or what asyncio has in place of one; 0 is returned if it is no TCP socket.
    """
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # it has gone
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size)
            return float(min(MAX_ROUND_TRIP_S, _ROUND_TRIP.unpack(info)[0] / 1e6))
    return 0.0


def half_of_descriptors(most: int) -> int:
    """Returns `most`, or half of the file descriptors that this process may have if that is less."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if descriptors == resource.RLIM_INFINITY else min(most, max(1, descriptors // 2))
