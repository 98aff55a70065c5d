"""Which user has a TCP socket of this network, as the kernel tells in /proc/net/tcp and /proc/net/tcp6."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final

__all__ = ["cut_off_other_users", "own_listening_ports", "user_of_peer", "users_listening"]

MAX_LOOKS: Final = 3
"""How often a socket is looked for that is not in the kernel's table."""

ESTABLISHED: Final = 1
LISTENS: Final = 10
"""States of a socket, as in the kernel's net/tcp_states.h."""

_EVERYBODY: Final = "4294967295"
"""The size of the range of users in a user namespace that has all of them."""

_Address: TypeAlias = tuple[str, int]


@final
@dataclass(frozen=True, slots=True)
class _TcpSocket:
    """A line of the kernel's tables.

    local, remote: address and port of both ends; IPv4 addresses in IPv6 are shown as IPv4.
    state: ESTABLISHED, LISTENS or another one.
    user: who has made it.
    inode: by which /proc/PID/fd names it; 0 if no process has it any more, and `user` says nothing.
    """

    local: _Address
    remote: _Address
    state: int
    user: int
    inode: int


def _tcp_sockets() -> Iterator[_TcpSocket]:
    """Yields the TCP sockets of this network. Raises OSError if the kernel does not tell."""
    for table in _tables():
        for line in table.splitlines()[1:]:
            yield _parse(line)


def users_listening(port: int) -> set[int]:
    """Returns the users who listen on a port of this network, at whatever address."""
    return {each.user for each in _tcp_sockets() if each.state == LISTENS and each.local[1] == port}


def user_of_peer(connection: socket.socket) -> int | None:
    """Returns the user at the other end of a connection within this network; None if that is not known."""
    with suppress(OSError):
        return _user_of(connection.getpeername()[:2], connection.getsockname()[:2])
    return None


def own_listening_ports() -> set[int]:
    """Returns the ports on which this process listens. Raises OSError if the kernel does not tell."""
    own = _own_descriptors()
    return {each.local[1] for each in _tcp_sockets() if each.state == LISTENS and each.inode in own}


def cut_off_other_users(known_ports: set[int]) -> list[int]:
    """Shuts down what other users have connected to the ports on which this process listens, but `known_ports`.

    The ports are at loopback addresses. Returns the users, -1 for one that is not known. Raises OSError if the
    kernel does not tell.
    """
    own = _own_descriptors()
    sockets = list(_tcp_sockets())
    ports = {each.local[1] for each in sockets if each.state == LISTENS and each.inode in own} - known_ports
    mine = [each for each in sockets if each.state == ESTABLISHED and each.local[1] in ports and each.inode in own]
    if not mine:
        return []
    before = {(each.local, each.remote): each for each in sockets}
    after = {(each.local, each.remote): each for each in _tcp_sockets()}
    found = []
    for each in mine:
        ends = each.remote, each.local
        user = _known_user(before.get(ends), after.get(ends))
        if user is None:  # it was missed, or has just connected: its line was read before that of this end
            user = _user_of(*ends)
        if user != os.geteuid():
            found.append(-1 if user is None else user)
            with suppress(OSError), socket.socket(fileno=os.dup(own[each.inode])) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    return found


def _user_of(local: _Address, remote: _Address) -> int | None:
    """Returns the user who has made the socket with these ends; None if that is not known.

    A line of the kernel's table may be missed while others change.
    """
    for _ in range(MAX_LOOKS):
        before, after = _find(local, remote), _find(local, remote)
        if before is not None and after is not None:
            return _known_user(before, after)
    return None


def _known_user(before: _TcpSocket | None, after: _TcpSocket | None) -> int | None:
    """Returns the user of a socket that was looked up twice; None if that is not known.

    The kernel shows the socket of a process that has closed it as one of root. So only a socket counts that is
    still connected after the user has been read.
    """
    if before is None or before != after or before.state != ESTABLISHED or not before.inode:
        return None
    return None if _may_stand_for_others(before.user) else before.user


def _own_descriptors() -> dict[int, int]:
    """Returns the descriptors of the sockets that this process has, by inode."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if link.startswith("socket:["):
                found[int(link[len("socket:[") : -1])] = int(descriptor)
    return found


def _may_stand_for_others(user: int) -> bool:
    """Returns whether the kernel shows users that are unknown in this user namespace by this number."""
    if str(user) != Path("/proc/sys/kernel/overflowuid").read_text().strip():
        return False
    return Path("/proc/self/uid_map").read_text().split()[2] != _EVERYBODY


def _tables() -> Iterator[str]:
    """Yields the kernel's tables for IPv4 and IPv6. Raises OSError if there are none."""
    yield Path("/proc/thread-self/net/tcp").read_text()
    with suppress(FileNotFoundError):  # a kernel without IPv6
        yield Path("/proc/thread-self/net/tcp6").read_text()


def _find(local: _Address, remote: _Address) -> _TcpSocket | None:
    """Returns the socket with these ends; None without one."""
    wanted = [f" {_written(*local, as_ipv6=each)} {_written(*remote, as_ipv6=each)} " for each in (False, True)]
    for table in _tables():  # searched as text, because it may be long
        for ends in wanted:
            if (found := table.find(ends)) >= 0:
                return _parse(table[table.rfind("\n", 0, found) + 1 : table.find("\n", found)])
    return None


def _parse(line: str) -> _TcpSocket:
    fields = line.split()
    return _TcpSocket(_read(fields[1]), _read(fields[2]), int(fields[3], 16), int(fields[7]), int(fields[9]))


def _read(text: str) -> _Address:
    """Returns an address and a port from a table: the address in words in the byte order of the machine."""
    digits, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    host = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return str(_plain(host)), int(port, 16)


def _written(host: str, port: int, *, as_ipv6: bool) -> str:
    """Returns an address and a port as a table has them."""
    address = _plain(host)
    packed = address.packed
    if as_ipv6 and address.version == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address; that of IPv4 for one of IPv4 in IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
