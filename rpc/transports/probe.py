"""Finds out whether anybody listens where a worker did: if not, its process is gone."""

import asyncio
import socket
from collections.abc import Callable
from enum import Enum, auto

from ...net.user_sockets import UNIX_SCHEME, is_listening

__all__ = ["Reach", "probe", "probe_now", "tcp_socket"]


class Reach(Enum):
    """What a probe has found."""

    LISTENING = auto()
    """Somebody accepts connections."""
    GONE = auto()
    """Nobody listens, as the host says: the process has ended."""
    UNKNOWN = auto()
    """The host does not answer."""


def probe_now(reach: Callable[[str], str], address: str) -> Reach:
    """Returns what can be found out without waiting of a worker's address: host:port, or unix: and a path.

    What to dial for it is what `reach` returns; it may raise OSError.
    """
    try:
        target = reach(address)
        if target.startswith(UNIX_SCHEME):
            return Reach.LISTENING if is_listening(target.removeprefix(UNIX_SCHEME)) else Reach.GONE
        connection, where = tcp_socket(target)
        with connection:
            connection.connect(where)
    except (ConnectionRefusedError, FileNotFoundError):
        return Reach.GONE
    except OSError:
        return Reach.UNKNOWN
    return Reach.LISTENING


async def probe(
    loop: asyncio.AbstractEventLoop, reach: Callable[[str], str], address: str, seconds: float
) -> Reach:
    """Returns what can be found out in some time: see `probe_now`."""
    if address.startswith(UNIX_SCHEME):
        return probe_now(reach, address)
    try:
        connection, where = tcp_socket(reach(address))
        with connection:
            async with asyncio.timeout(seconds):
                await loop.sock_connect(connection, where)
    except ConnectionRefusedError:
        return Reach.GONE
    except OSError:  # a TimeoutError, too
        return Reach.UNKNOWN
    return Reach.LISTENING


def tcp_socket(address: str) -> tuple[socket.socket, tuple[str, int]]:
    """Returns an unconnected socket for a numeric address and port, and what to connect it to."""
    host, _, port = address.rpartition(":")
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    connection.settimeout(0)
    return connection, (host.strip("[]"), int(port))
