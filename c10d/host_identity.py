"""Which ranks share memory, which share a network, and at which address others reach this process.

The two are not the same: containers of one machine may have either in common without the other.
"""

import fcntl
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, final

from ..errors import ProcessGroupError
from .torch_types import TorchStore

__all__ = [
    "INTERFACES",
    "LOOPBACK",
    "Host",
    "address_for_others",
    "hosts_of",
    "is_local",
    "listen",
    "network_name",
    "share_memory",
    "share_network",
]

LOOPBACK = "127.0.0.1"

INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interfaces that Gloo uses; everything else here uses the first of them."""

_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that are nobody's (RFC 5737, RFC 3849). Nothing is sent there."""

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of netdevice(7)."""


@final
@dataclass(frozen=True, slots=True)
class Host:
    """Where a process runs.

    memory: what processes have in common if, and only if, they can share memory.
    network: what they have in common if, and only if, they reach each other on the loopback address.
    """

    memory: str
    network: str

    @classmethod
    def here(cls) -> Self:
        """Of this process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes, users, network = (os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "user", "net"))
        # gradwire's shared memory has no name, but must be opened through /proc; MPI's is in /dev/shm.
        with suppress(OSError):
            boot += f" /dev/shm:[{os.stat('/dev/shm').st_dev}]"
        return cls(f"{boot} {processes} {users} user {os.geteuid()}", f"{boot.split()[0]} {network}")


def share_memory(hosts: Sequence[Host]) -> bool:
    """Can all processes on these hosts share memory?"""
    return len({host.memory for host in hosts}) == 1


def share_network(hosts: Sequence[Host]) -> bool:
    """Do all processes on these hosts reach each other on the loopback address?"""
    return len({host.network for host in hosts}) == 1


def hosts_of(store: TorchStore, rank: int, size: int, seconds: float | None = None) -> list[Host]:
    """`Host.here()` of every rank; all must ask, and do so once for a store.

    seconds: how long the others may take to ask; None for as long as the store waits.
    """
    store.set(f"host/{rank}", json.dumps(astuple(Host.here())))
    keys = [f"host/{other}" for other in range(size)]
    if seconds is not None:
        store.wait(keys, timedelta(seconds=seconds))
    return [Host(*json.loads(store.get(key))) for key in keys]


def listen(hosts: Sequence[Host], store: TorchStore) -> tuple[socket.socket, str]:
    """A socket that the ranks on these hosts can connect to, and the address to do it by.

    If all share a network, nobody else can reach it.
    """
    if share_network(hosts):
        return socket.create_server((LOOPBACK, 0)), LOOPBACK
    address = address_for_others(store)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family), address


def network_name() -> str:
    """What processes have in common if they reach each other on the loopback address (see Host)."""
    try:
        return Host.here().network
    except OSError:  # no /proc: then a host has one network
        return socket.gethostname()


def address_for_others(store: TorchStore | None = None, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """The address of this host at which processes on other hosts reach it.

    It is that of the interface that GLOO_SOCKET_IFNAME names first. Without one, it is that from which this host
    reaches the store, if it is a TCPStore, where others are too; or else that of the host's name; or else that of
    the default route; or else that of the first interface that has one. The loopback address is taken only if
    there is no other.

    Args:
        store: where the others are to be found.
        family: IPv4 or IPv6, if it must be one of them.

    Raises:
        ProcessGroupError: GLOO_SOCKET_IFNAME names an interface that has no address.
    """
    interface = os.environ.get(INTERFACES, "").split(",")[0]
    if interface:
        return _of_interface(interface)
    for goal in (_host_of(store), socket.gethostname(), *_ELSEWHERE):
        with suppress(OSError, UnicodeError):  # an unknown name, or no way there
            found = socket.getaddrinfo(goal, 9, family, socket.SOCK_DGRAM) if goal else ()
            for kind, form, _, _, there in found:
                with socket.socket(kind, form) as way:
                    way.connect(there)  # of UDP: looks for the way, and sends nothing
                    address = str(way.getsockname()[0])
                if not is_local(address):
                    return address
    for _, name in socket.if_nameindex():
        with suppress(ProcessGroupError):  # it has no IPv4 address
            if family != socket.AF_INET6 and not is_local(address := _of_interface(name)):
                return address
    return LOOPBACK


def is_local(address: str) -> bool:
    """Does a numeric address mean something on this host only?"""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or (parsed.version == 6 and parsed.is_link_local)


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", os.fsencode(name)[:15]))
        except OSError as error:
            there = ", ".join(each for _, each in socket.if_nameindex())
            raise ProcessGroupError(
                f"{INTERFACES} names the interface {name!r}, which has no IPv4 address here ({error.strerror}): "
                f"set it to one of {there}, or to nothing"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _host_of(store: Any) -> str:
    """The host of a TCPStore, gradwire's or torch's, under whatever prefixes; empty if it is another store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))
