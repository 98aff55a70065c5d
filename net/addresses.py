"""Network addresses: how they are written, which may be used without credentials, where this process listens.

It listens at an address of its own and a port that it may use. Others reach it by one of the interfaces of this
host, or where it is told that they do.
"""

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

import psutil

from ..errors import ProcessGroupError, StoreError

__all__ = [
    "ADVERTISED_VARIABLE",
    "ANY_PORT",
    "HOST_VARIABLE",
    "INSECURE_VARIABLE",
    "INTERFACE_VARIABLE",
    "LOOPBACK",
    "ListenSettings",
    "PortRange",
    "address_for_others",
    "allows_insecure",
    "format_address",
    "host_for_listening",
    "interface_addresses",
    "is_local",
    "is_loopback",
    "is_numeric",
    "is_tcp_address",
    "own_address",
    "parse_ports",
    "require_trusted",
    "resolve",
]

INSECURE_VARIABLE = "GRADWIRE_INSECURE"
"""The environment variable that stands for `insecure=True` where a program calls torch's functions."""

HOST_VARIABLE = "GRADWIRE_HOST"

ADVERTISED_VARIABLE = "GRADWIRE_ADVERTISED_HOST"

PORTS_VARIABLE = "GRADWIRE_PORTS"

MAX_PORT = 65535

LOOPBACK = "127.0.0.1"

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names Gloo's network interfaces. All else in gradwire uses the first of them."""

_UNASSIGNED_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849), to find the default route. Nothing is sent there."""


def allows_insecure(insecure: bool) -> bool:
    """Returns whether other hosts may connect without credentials, as the caller or GRADWIRE_INSECURE says.

    Raises:
        ValueError: GRADWIRE_INSECURE is neither 0 nor 1.
    """
    value = os.environ.get(INSECURE_VARIABLE, "")
    if value not in {"", "0", "1"}:
        raise ValueError(f"{INSECURE_VARIABLE} is {value!r}: set it to 1, or to 0")
    return insecure or value == "1"


def format_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> list[str]:
    """Returns the numeric addresses of a host name, each once, in the resolver's order.

    Raises:
        StoreError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StoreError(f"the host name {host!r} cannot be resolved: {error}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(host: str) -> bool:
    """Returns whether an address, or every address of a host name, is a loopback address.

    Raises:
        StoreError: the name cannot be resolved.
    """
    return all(ipaddress.ip_address(address).is_loopback for address in resolve(host))


def require_trusted(host: str, *, insecure: bool, action: str, how_to_allow: str = "pass insecure=True") -> None:
    """Raises if others than this host's processes could read and write the store at this address.

    The message says what is refused, the `action`, such as "dialling".

    Raises:
        StoreError: `host` is not a loopback address and `insecure` is false, or `host` cannot be resolved.
    """
    if not allows_insecure(insecure) and not is_loopback(host):
        raise StoreError(
            f"{action} {host!r} is refused: it is not a loopback address, and there are no credentials, so "
            "anyone who reaches it could run code on the workers. Set GRADWIRE_TOKEN to a token that "
            f"`gradwire certs token` prints, on all of them; or, on a network that you trust, {how_to_allow}"
        )


def host_for_listening(host: str, *, insecure: bool) -> str:
    """Returns the address to listen on so that other hosts can connect to `host`.

    On Debian a host's own name resolves, on that host, to a loopback address, which other hosts cannot reach. If
    `host` is such a name and `insecure` allows it, this returns the wildcard address.
    """
    if not allows_insecure(insecure) or host == "localhost" or host.endswith(".localhost") or is_numeric(host):
        return host
    if not is_loopback(host):
        return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_numeric(host: str) -> bool:
    """Returns whether `host` is an address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_tcp_address(address: str) -> bool:
    """Returns whether a text is a numeric address and a port, as `format_address` writes them."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return is_numeric(host) and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16


@final
@dataclass(frozen=True, slots=True)
class PortRange:
    """TCP ports of which a listening socket takes the first that is free.

    first, last: both are part of it; 0 and 0 for any port, which the kernel chooses.
    """

    first: int = 0
    last: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def listen(self, host: str) -> socket.socket:
        """Returns a socket that listens on an address of this host (see `own_address` for names).

        Raises:
            OSError: the address is not one of this host, or none of the ports is free.
        """
        family, kind, _, _, where = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        for port in self:
            listener = socket.socket(family, kind)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # though a former one lingers there
                listener.bind((where[0], port, *where[2:]))
                listener.listen(socket.SOMAXCONN)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE or self.last == 0:
                    raise
            else:
                return listener
        raise self._exhausted(host)

    def last_free(self, host: str) -> int:
        """Returns the last port that is free at a numeric address, which others take last; 0 for any port.

        Raises:
            OSError: the address is not one of this host, or none of the ports is free.
        """
        for port in reversed(list(self)):
            if _is_free(host, port):
                return port
        raise self._exhausted(host)

    def choose(self, host: str, listen: Callable[[int], int]) -> int:
        """Has a server listen on the first port that is free at a numeric address. Returns the port.

        `listen` has it listen on a port, or raises RuntimeError, and returns the port.

        Raises:
            OSError: the address is not one of this host, or none of the ports is free.
            RuntimeError: that of `listen`, if any port may be used.
        """
        if self.last == 0:
            return listen(0)
        last: RuntimeError | None = None
        for port in self:
            if _is_free(host, port):  # first, because gRPC logs ports that it cannot use
                try:
                    return listen(port)
                except RuntimeError as error:
                    last = error  # another process may have taken the port meanwhile
        raise self._exhausted(host) from last

    def _exhausted(self, host: str) -> OSError:
        return OSError(
            errno.EADDRINUSE,
            f"no port of {self} is free at {format_address(host, self.first)}: a worker uses two, one with "
            f"transports=('grpc',); give a larger range, by {PORTS_VARIABLE} or the option ports",
        )


ANY_PORT = PortRange()


def _is_free(host: str, port: int) -> bool:
    """Returns whether a port is free. Raises OSError if the address is not one of this host."""
    try:
        PortRange(port, port).listen(host).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def parse_ports(value: object, name: str) -> PortRange:
    """Returns the ports that an option or a variable of this name has: 29600, "29600" or "29600-29699".

    Raises:
        ValueError: it has something else.
    """
    if isinstance(value, PortRange):
        return value
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str) and text.isascii():
        first, separator, last = text.strip().partition("-")
        if first.isdigit() and (last.isdigit() if separator else not last) and len(text) <= len("65535-65535") + 2:
            found = PortRange(int(first), int(last or first))
            if 0 < found.first <= found.last <= MAX_PORT:
                return found
    raise ValueError(f"{name} is {value!r}: give a port or a range from 1 to {MAX_PORT}, such as 29600-29699")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where a process listens.

    host: an address or name of this host, or a wildcard; None to choose one.
    advertised_host: the address or name that others dial instead, as behind NAT; None for the one listened on.
    ports: those that may be used.
    """

    host: str | None = None
    advertised_host: str | None = None
    ports: PortRange = field(default=ANY_PORT)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ListenSettings":
        """Returns what GRADWIRE_HOST, GRADWIRE_ADVERTISED_HOST and GRADWIRE_PORTS say.

        Raises:
            ValueError: GRADWIRE_PORTS names no ports.
        """
        ports = environment.get(PORTS_VARIABLE, "")
        return cls(
            host=_without_brackets(environment.get(HOST_VARIABLE, "")) or None,
            advertised_host=_without_brackets(environment.get(ADVERTISED_VARIABLE, "")) or None,
            ports=parse_ports(ports, PORTS_VARIABLE) if ports else ANY_PORT,
        )


def _without_brackets(host: str) -> str:
    """Returns a host without the brackets that IPv6 addresses have in URLs."""
    return host.removeprefix("[").removesuffix("]")


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
