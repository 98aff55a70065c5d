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

__all__ = ["ESTABLISHED", "LISTENS", "TcpSocket", "own_inodes", "tcp_sockets", "user_of_peer", "users_listening"]

ESTABLISHED: Final = 1
LISTENS: Final = 10
"""States of a socket, as in the kernel's net/tcp_states.h."""

_EVERYBODY: Final = "4294967295"
"""The size of the range of users in a user namespace that has all of them."""

_Address: TypeAlias = tuple[str, int]


@final
@dataclass(frozen=True, slots=True)
class TcpSocket:
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


def tcp_sockets() -> Iterator[TcpSocket]:
    """Yields the TCP sockets of this network. Raises OSError if the kernel does not tell."""
    for table in _tables():
        for line in table.splitlines()[1:]:
            yield _parse(line)


def users_listening(port: int) -> set[int]:
    """Returns the users who listen on a port of this network, at whatever address."""
    return {each.user for each in tcp_sockets() if each.state == LISTENS and each.local[1] == port}


def user_of_peer(connection: socket.socket) -> int | None:
    """Returns the user who has made the other end of a connection within this network; None if that is not known.

    The kernel shows the socket of a process that has closed it as one of root. So only a socket counts that is
    still connected after the user has been read.
    """
    with suppress(OSError):
        ends = connection.getpeername()[:2], connection.getsockname()[:2]
        before, after = _find(*ends), _find(*ends)
        is_known = before is not None and before == after and before.state == ESTABLISHED and before.inode
        if before is not None and is_known and not _may_stand_for_others(before.user):
            return before.user
    return None


def own_inodes() -> set[int]:
    """Returns the inodes of the sockets that this process has."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if link.startswith("socket:["):
                found.add(int(link[len("socket:[") : -1]))
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


def _find(local: _Address, remote: _Address) -> TcpSocket | None:
    """Returns the socket with these ends; None without one."""
    wanted = [f" {_written(*local, as_ipv6=each)} {_written(*remote, as_ipv6=each)} " for each in (False, True)]
    for table in _tables():  # searched as text, because it may be long
        for ends in wanted:
            if (found := table.find(ends)) >= 0:
                return _parse(table[table.rfind("\n", 0, found) + 1 : table.find("\n", found)])
    return None


def _parse(line: str) -> TcpSocket:
    fields = line.split()
    return TcpSocket(_read(fields[1]), _read(fields[2]), int(fields[3], 16), int(fields[7]), int(fields[9]))


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
