"""Where a process listens: the ports that it may use, its own address, and the one that others dial."""

import errno
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from .addresses import format_address

__all__ = [
    "ADVERTISED_VARIABLE",
    "ANY_PORT",
    "HOST_VARIABLE",
    "PORTS_VARIABLE",
    "ListenSettings",
    "PortRange",
    "parse_ports",
]

HOST_VARIABLE = "GRADWIRE_HOST"
ADVERTISED_VARIABLE = "GRADWIRE_ADVERTISED_HOST"
PORTS_VARIABLE = "GRADWIRE_PORTS"

MAX_PORT = 65535


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
        """Returns a socket that listens on an address of this host (see `interfaces.own_address` for names).

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
