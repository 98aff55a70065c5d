"""Finds out whether a member lives, when a worker wants its name or its place."""

import socket
from enum import Enum, auto

from ...net.host_identity import network_id
from ...net.interfaces import is_local
from ...net.user_sockets import UNIX_SCHEME
from ..contracts.worker import Member
from .addresses import ListenAddress, identity

__all__ = ["Presence", "presence_of"]

PROBE_TIMEOUT_S = 5.0
"""Seconds that a member may take to answer, when a worker that wants its name checks that it lives."""

_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
"""What a gRPC client says first. Whatever listens answers it, or hangs up."""


class Presence(Enum):
    """What is known of a member."""

    ALIVE = auto()
    """It answers, or cannot be asked from here."""
    SILENT = auto()
    """It does not answer, and its process may live."""
    GONE = auto()
    """Its process has ended: nobody listens at its address."""


def presence_of(member: Member, where: ListenAddress, seconds: float = PROBE_TIMEOUT_S) -> Presence:
    """Returns what can be found out of a member in some seconds, by a worker that listens at `where`."""
    is_here = member.network == network_id() and member.directory == identity(where.directory)
    if not is_here and (member.has_unix_socket or is_local(member.host)):
        return Presence.ALIVE  # as far as can be told: elsewhere its address means something else
    try:
        with _connect(where.reach(member.address), seconds) as connection:
            connection.sendall(_OPENING)
            connection.recv(1)
    except (ConnectionRefusedError, FileNotFoundError):
        return Presence.GONE
    except (ConnectionResetError, BrokenPipeError):
        return Presence.ALIVE
    except OSError:
        return Presence.SILENT
    return Presence.ALIVE


def _connect(target: str, seconds: float) -> socket.socket:
    if not target.startswith(UNIX_SCHEME):
        host, _, port = target.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), seconds)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    try:
        connection.connect(target.removeprefix(UNIX_SCHEME))
    except BaseException:
        connection.close()
        raise
    return connection
