"""Network addresses: how they are written, and which of them may be used without credentials."""

import ipaddress
import socket

from ..errors import StoreError

__all__ = ["format_address", "is_loopback", "require_trusted", "resolve"]


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


def require_trusted(host: str, *, insecure: bool, doing: str) -> None:
    """Refuses an address on which strangers could read and write the store.

    Raises:
        StoreError: `host` is no loopback address and `insecure` is false, or `host` is unknown.
    """
    if not insecure and not is_loopback(host):
        raise StoreError(
            f"{doing} {host!r} is refused: it is not a loopback address, and no credentials are set up, so "
            "anyone who reaches it could run code on the workers. On a network that you trust, pass "
            "insecure=True"
        )
