"""The unix socket of a store that has no credentials, for the processes of its user on its host.

A port on the loopback address is open to every user of the host, and the server would serve them all. So such a
store listens on a unix socket in a directory that only its user can use. The port names the socket. It is kept
from other programs of this user, but nobody listens there, and if another user has it, that does not matter.
"""

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from ...errors import StoreError, StoreNetworkError
from ...net.addresses import format_address
from ...net.socket_owners import users_listening
from ...net.user_sockets import (
    UNIX_SCHEME,
    SocketDirectory,
    SocketFile,
    UnsafePathError,
    is_listening,
    store_socket_name,
)

__all__ = ["find_store", "listen_locally", "reserve_port", "who_listens"]


def listen_locally(
    listen: Callable[[str], object], host: str, port: int, *, insecure: bool = False
) -> SocketFile | None:
    """Has a server listen on a socket, by an address of gRPC. Clients find it by the port; messages name the host.

    Returns the socket's file; None if there can be none, and with `insecure` the port will do.
    """
    try:
        file = SocketFile(SocketDirectory.of_this_user(), store_socket_name(port))
        with file.claim():
            listen(f"{UNIX_SCHEME}{file.bind_path}")
    except FileExistsError as error:
        raise StoreNetworkError(
            f"a store cannot listen on {format_address(host, port)}: {os.strerror(errno.EADDRINUSE)} "
            "(EADDRINUSE): another store of this user has this port"
        ) from error
    except (UnsafePathError, TimeoutError) as error:
        if insecure:
            return None
        raise StoreError(f"a store without credentials cannot listen for this user only: {error}") from error
    return file


def reserve_port(address: str, port: int) -> socket.socket | None:
    """Keeps a port, or a free one for 0, from other programs, without listening there.

    Returns a socket that has the port; None if another user has it. Raises OSError if a process of this user
    listens there, or the address, a numeric one, is none of this host.
    """
    kept = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        kept.bind((address, port))
    except OSError as error:
        kept.close()
        if error.errno != errno.EADDRINUSE or not port or _is_taken(port):
            raise
        return None
    return kept


def _is_taken(port: int) -> bool:
    """Returns whether a process of this user listens on a port."""
    try:
        return os.geteuid() in users_listening(port)
    except OSError:
        return True


def find_store(port: int) -> tuple[SocketDirectory, str] | None:
    """Returns where this user's store that has a port listens; None without one.

    That is an address of gRPC, which is good as long as the directory is open that comes with it. A store that was
    killed has left its socket, maybe in another directory than that of the one that runs.
    """
    name = store_socket_name(port)
    for directory in SocketDirectory.all_of_this_user():
        with suppress(OSError):  # it is missing, or has just been bound and is not restricted yet
            path = directory.reach(f"{directory.path}/{name}")
            if is_listening(path):
                return directory, UNIX_SCHEME + path
    return None


def who_listens(host: str, port: int) -> str:
    """Returns, for messages, which other user listens on a port; empty if none does."""
    with suppress(OSError):
        for user in sorted(users_listening(port) - {os.geteuid()}):
            where = format_address(host, port)
            return f"user {user} listens on {where}, and a store of another user is not used"
    return ""
