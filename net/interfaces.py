"""The network interfaces of this host, and at which of their addresses other hosts reach this process."""

import errno
import ipaddress
import os
import socket
from contextlib import suppress

import psutil

from ..errors import ProcessGroupError
from .addresses import resolve
from .listening import ANY_PORT

__all__ = [
    "INTERFACE_VARIABLE",
    "LOOPBACK",
    "address_for_others",
    "interface_addresses",
    "is_local",
    "own_address",
]

LOOPBACK = "127.0.0.1"

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names Gloo's network interfaces. All else in gradwire uses the first of them."""

_UNASSIGNED_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849), to find the default route. Nothing is sent there."""


def interface_addresses() -> dict[str, list[str]]:
    """Returns the addresses of each network interface that has any, IPv4 first, by the interface's name."""
    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for each in addresses:
                if each.family == family:
                    found.setdefault(name, []).append(each.address)
    return found


def address_for_others(toward: str = "", family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Returns the address at which processes on other hosts reach this host.

    That is the address of the first interface in GLOO_SOCKET_IFNAME, if it is set. Otherwise it is the first of
    these that is not a loopback address: the local address of the route to `toward`; of the route to this host's
    name; of the default route; the address of any interface. If there is none, it is the loopback address.

    Args:
        toward: the name or address of a host that all processes of the group reach; empty if none is known.
        family: AF_INET or AF_INET6, if the address must be of that family.

    Raises:
        ProcessGroupError: GLOO_SOCKET_IFNAME names an interface that has no address.
    """
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    if interface:
        return _interface_address(interface, family)
    for destination in (toward, socket.gethostname(), *_UNASSIGNED_ADDRESSES):
        with suppress(OSError, UnicodeError):  # an unknown name, or no route
            found = socket.getaddrinfo(destination, 9, family, socket.SOCK_DGRAM) if destination else ()
            for found_family, kind, _, _, remote in found:
                with socket.socket(found_family, kind) as probe:
                    probe.connect(remote)  # on a UDP socket: looks up the route, and sends nothing
                    address = str(probe.getsockname()[0])
                if not is_local(address):
                    return address
    addresses = (address for each in interface_addresses().values() for address in each)
    return next((each for each in addresses if not is_local(each) and _is_of(family, each)), LOOPBACK)


def _interface_address(name: str, family: socket.AddressFamily) -> str:
    """Returns the first address of an interface, without those of one link, which mean nothing on other hosts."""
    usable = {
        each: [address for address in addresses if _is_of(family, address) and not _is_link_local(address)]
        for each, addresses in interface_addresses().items()
    }
    if not (found := usable.get(name)):
        names = ", ".join(each for each, addresses in usable.items() if addresses)
        raise ProcessGroupError(
            f"{INTERFACE_VARIABLE} names the interface {name!r}, which has no such address on this "
            f"host: set it to one of {names}, or unset it"
        )
    return found[0]


def _is_of(family: socket.AddressFamily, address: str) -> bool:
    return family == socket.AF_UNSPEC or (":" in address) == (family == socket.AF_INET6)


def own_address(host: str) -> str:
    """Returns the first address of a host name that is one of this machine, loopback addresses last.

    Raises:
        OSError: none of them is.
        StoreError: the name cannot be resolved.
    """
    problem: OSError | None = None
    for address in sorted(resolve(host), key=is_local):
        try:
            ANY_PORT.listen(address).close()
        except OSError as error:
            problem = error
        else:
            return address
    raise problem or OSError(errno.EADDRNOTAVAIL, "it has no address")


def is_local(address: str) -> bool:
    """Returns whether a numeric address is a loopback or link-local one, which is not valid on other hosts."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback or _is_link_local(address)


def _is_link_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.version == 6 and parsed.is_link_local
