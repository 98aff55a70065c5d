"""What the kernel tells of a peer that has said nothing: whether its process runs.

A program that holds the interpreter, to pickle a large object for example, keeps all of its Python threads from
sending heartbeats. On one host, the kernel says whether the peer's process is stopped. To other hosts, gRPC sends
pings by threads that need no interpreter, and the kernel says when bytes have come by a connection last.
"""

import contextlib
import ipaddress
import os
import socket
from typing import Final

from ...net.socket_peers import process_of_peer, since_received_s

__all__ = ["has_received", "process_at", "process_runs"]

_NOT_RUNNING: Final = frozenset("TtZXx")
"""States of processes that are stopped, traced or dead."""


def process_at(path: str) -> int:
    """Returns the process that listens on a unix socket; 0 if the kernel does not name it.

    Raises:
        OSError: nobody listens.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0)
        connection.connect(path)
        return process_of_peer(connection)


def process_runs(process: int) -> bool:
    """Returns whether a process of this host is neither stopped nor dead; False if that cannot be found out."""
    if process <= 0:  # it is in another PID namespace
        return False
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            _, _, fields = file.read().rpartition(b") ")
    except OSError:
        return False
    return fields[:1].decode() not in _NOT_RUNNING


def has_received(address: str, seconds: float) -> bool:
    """Returns whether data has come, in the last seconds, by a TCP connection of this process with an address.

    The connections are gRPC's, which tells neither of them nor of the pings that come by them.

    Args:
        address: that of the other end: host:port.
        seconds: how long ago at most.
    """
    host, _, port = address.rpartition(":")
    wanted = _address(host.strip("[]")), int(port)
    return any(_has_received(int(each), wanted, seconds) for each in os.listdir("/proc/self/fd"))


def _has_received(descriptor: int, wanted: "tuple[_Address, int]", seconds: float) -> bool:
    with contextlib.suppress(OSError, ValueError):  # it is no TCP socket, or has been closed in between
        if os.get_blocking(descriptor):  # it is none of gRPC's, and a default timeout would change that
            return False
        duplicate = os.dup(descriptor)  # which nobody else closes
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            return False
        with connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            host, port = connection.getpeername()[:2]
            if (_address(host), port) != wanted:
                return False
            return since_received_s(connection) < seconds
    return False


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(host: str) -> _Address:
    """Returns an address, that of IPv4 for one that is written as IPv6, as gRPC's listeners see it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
