"""Network addresses: how they are written, and which of them may be used without credentials."""

import ipaddress
import os
import socket

from ..errors import StoreError

__all__ = [
    "INSECURE_VARIABLE",
    "allows_insecure",
    "format_address",
    "host_for_listening",
    "is_loopback",
    "is_numeric",
    "is_tcp_address",
    "require_trusted",
    "resolve",
]

INSECURE_VARIABLE = "GRADWIRE_INSECURE"
"""The environment variable that stands for `insecure=True` where a program calls torch's functions."""


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
