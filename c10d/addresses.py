"""Network addresses: how they are written, and which of them may be used without credentials."""

import ipaddress
import socket

from ..errors import StoreError

__all__ = ["format_address", "host_for_listening", "is_loopback", "is_numeric", "require_trusted", "resolve"]


def format_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> list[str]:
    """The numeric addresses of a host name, each once, in the resolver's order.

    Raises:
        StoreError: the name is unknown.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StoreError(f"the host name {host!r} cannot be resolved: {error}") from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(host: str) -> bool:
    """Is `host` reachable from this machine only? A name is, if all its addresses are.

    Raises:
        StoreError: the name is unknown.
    """
    return all(ipaddress.ip_address(address).is_loopback for address in resolve(host))


def require_trusted(host: str, *, insecure: bool, doing: str, consent: str = "pass insecure=True") -> None:
    """Refuses an address on which strangers could read and write the store.

    Args:
        host: a name or an address.
        insecure: the caller has allowed any.
        doing: what is refused, for the message.
        consent: how the caller allows it, likewise.

    Raises:
        StoreError: `host` is no loopback address and `insecure` is false, or `host` is unknown.
    """
    if not insecure and not is_loopback(host):
        raise StoreError(
            f"{doing} {host!r} is refused: it is not a loopback address, and no credentials are set up, so "
            f"anyone who reaches it could run code on the workers. On a network that you trust, {consent}"
        )


def host_for_listening(host: str, *, insecure: bool) -> str:
    """Where to listen so that others reach this host by a name of its own.

    Debian has a host's name lead to its loopback address on the host itself, so what listens there is not reached
    by others, who know the name from elsewhere. Where strangers are allowed, it listens on all addresses instead.

    Args:
        host: a name or an address.
        insecure: addresses that are not loopback ones are allowed.
    """
    if not insecure or host == "localhost" or host.endswith(".localhost") or is_numeric(host):
        return host
    if not is_loopback(host):
        return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def is_numeric(host: str) -> bool:
    """Is it an address rather than a name?"""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
