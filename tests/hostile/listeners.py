"""Finds the sockets on which processes listen, in /proc: whoever has opened them, and in any network namespace."""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Listener", "find_listeners"]

_TCP_LISTEN = "0A"
_UNIX_ACCEPTS = 0x10000
"""The state of a listening socket in /proc/net/tcp, and the flag of one in /proc/net/unix."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket on which a process listens.

    pid: the process.
    family: "tcp" or "unix".
    name: `address:port`, or the path of a unix socket, or its abstract name after an `@`.
    """

    pid: int
    family: str
    name: str

    @property
    def address(self) -> tuple[str, int] | str:
        """What to connect to, on the host of the process."""
        if self.family == "unix":
            return f"\0{self.name[1:]}" if self.name.startswith("@") else self.name
        host, _, port = self.name.rpartition(":")
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port)


def find_listeners(pid: int) -> list[Listener]:
    """Returns the listening sockets of a process and of those that it has started."""
    found: dict[Listener, None] = {}
    for each in [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]:
        inodes = _socket_inodes(each)
        for family, name, inode in (*_tcp(each, "tcp"), *_tcp(each, "tcp6"), *_unix(each)):
            if inode in inodes:
                found[Listener(each, family, name)] = None
    return list(found)


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed by now
            link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if link.startswith("socket:["):
                inodes.add(link[len("socket:[") : -1])
    return inodes


def _tcp(pid: int, table: str) -> Iterator[tuple[str, str, str]]:
    for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _TCP_LISTEN:
            address, _, port = fields[1].partition(":")
            yield "tcp", f"{_ip(address)}:{int(port, 16)}", fields[9]


def _ip(digits: str) -> str:
    """Returns the address that the kernel has written as words in the byte order of the machine."""
    packed = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")


def _unix(pid: int) -> Iterator[tuple[str, str, str]]:
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _UNIX_ACCEPTS and len(fields) == 8:
            path = fields[7]
            if path.startswith("/proc/self/"):  # as whoever has bound it reached it
                path = os.path.realpath(path.replace("/proc/self/", f"/proc/{pid}/", 1))
            yield "unix", path, fields[6]
