"""What the kernel tells of a peer that has said nothing: whether its process runs.

A program that holds the interpreter, to pickle a large object for example, keeps all of its Python threads from
sending heartbeats. On one host, the kernel says whether the peer's process is stopped. To other hosts, gRPC sends
pings by threads that need no interpreter, and the kernel says when bytes have come by a connection last.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
from typing import Final, final

from ...net.socket_peers import process_of_peer, since_received_s

__all__ = ["ReceivedTimes", "process_at", "process_runs"]

_NOT_RUNNING: Final = frozenset("TtZXx")
"""States of processes that are stopped, traced or dead."""


def process_at(path: str) -> int:
    """Returns the process that listens on a unix socket; 0 if unknown. Raises OSError if nobody listens."""
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


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(host: str) -> _Address:
    """Returns an address, that of IPv4 for one that is written as IPv6, as gRPC's listeners see it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


@final
class ReceivedTimes:
    """When data has come last by the TCP connections of this process. Used on the event loop only.

    The connections are gRPC's, which tells neither of them nor of the pings that come by them. All descriptors are
    looked at once for all that is asked before the loop goes on: many peers may be silent at the same time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since: dict[tuple[_Address, int], float] | None = None
        """Seconds, by the address at the other end; None if that has to be found out."""

    def has_received(self, address: str, seconds: float) -> bool:
        """Returns whether data has come in the last seconds from an address, host:port."""
        if self._since is None:
            self._since = _since_received()
            self._loop.call_soon(self._discard)
        host, _, port = address.rpartition(":")
        return self._since.get((_address(host.strip("[]")), int(port)), seconds) < seconds

    def _discard(self) -> None:
        self._since = None


def _since_received() -> dict[tuple[_Address, int], float]:
    """Returns for how many seconds no data has come, by the address at the other end of each TCP connection."""
    found: dict[tuple[_Address, int], float] = {}
    for each in os.listdir("/proc/self/fd"):
        descriptor = int(each)
        with contextlib.suppress(OSError, ValueError):  # it is no TCP socket, or has been closed in between
            if os.get_blocking(descriptor):  # it is none of gRPC's, and a default timeout would change that
                continue
            duplicate = os.dup(descriptor)  # which nobody else closes
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            with connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    host, port = connection.getpeername()[:2]
                    where, since = (_address(host), port), since_received_s(connection)
                    found[where] = min(since, found.get(where, since))
    return found
