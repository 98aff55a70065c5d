"""Chooses the address a worker listens on, and checks whether the other members can reach it."""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ...c10d.addresses import is_loopback, is_numeric, resolve
from ...c10d.host_identity import LOOPBACK, address_for_others, is_local
from ...c10d.stores.describe import innermost_store
from ...c10d.torch_types import TorchStore
from ...errors import ProcessGroupError, RpcError, StoreError
from ..contracts.options import RpcBackendOptions
from .members import Member

__all__ = ["ListenAddress", "check_consent", "choose_address", "unreachable_members"]


@final
@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The numeric addresses of a worker's server.

    bind: the address to listen on; may be a wildcard.
    advertised: the address that the other members dial.
    """

    bind: str = LOOPBACK
    advertised: str = LOOPBACK


def check_consent(options: RpcBackendOptions) -> None:
    """Refuses a `host` that other machines can reach, unless the options allow it.

    Raises:
        RpcError: the host is not a loopback address or cannot be resolved.
    """
    if options.insecure or options.host is None:
        return
    try:
        allowed = is_loopback(options.host)
    except StoreError as error:
        raise RpcError(f"host is {options.host!r}: {error}") from error
    if not allowed:
        raise RpcError(
            f"host is {options.host!r}, which other machines can reach, and anybody who reaches a worker can run "
            f"code in it: leave host out, or, on a network that you trust, {options.CONSENT}"
        )


def choose_address(options: RpcBackendOptions, store: TorchStore, networks: Sequence[str] | None) -> ListenAddress:
    """Returns where a worker is to listen.

    Without `options.host` that is the loopback address, unless the options allow others and some members are, or
    may be, on other hosts. Then it is the address by which this host reaches the store, or that others reach
    (`c10d.host_identity.address_for_others`).

    Args:
        options: those of the worker.
        store: the store at which the group rendezvous.
        networks: the network names of all members; None if they are not known, as in a dynamic group.

    Raises:
        RpcError: `options.host` is not an address of this machine.
    """
    host = options.host
    if host is None:
        is_one_host = _is_local_store(store) if networks is None else len(set(networks)) == 1
        if is_one_host or not options.insecure:
            return ListenAddress()
        address = _address_for_others(store)
        return ListenAddress(address, address)
    if is_numeric(host) and ipaddress.ip_address(host).is_unspecified:
        family = socket.AF_INET if ":" not in host else socket.AF_UNSPEC  # "::" takes both
        return ListenAddress(host, _address_for_others(store, family))
    return _own_address(host)


def unreachable_members(members: Sequence[Member], consent: str) -> str:
    """Returns an error message that names the members which others cannot reach; empty if there are none.

    Args:
        members: all members of the group.
        consent: how users allow addresses other than loopback, for the message.
    """
    if len({member.network for member in members}) <= 1:
        return ""
    hidden = [member for member in members if is_local(member.host)]
    if not hidden:
        return ""
    shown = ", ".join(f"{member} on {member.host}" for member in hidden[:8]) + ", …" * (len(hidden) > 8)
    return (
        "the workers are on several hosts (or in containers with networks of their own), where the others cannot "
        f"reach those that listen on an address for their own host only: {shown}. On every worker {consent}; that "
        "lets anybody who reaches a worker run code in it, so the network must be one that you trust. Give host= "
        "only where a worker has to be told which of its addresses the others reach"
    )


def _is_local_store(store: TorchStore) -> bool:
    """Returns whether only processes of this host can reach the store."""
    host = str(getattr(innermost_store(store), "host", ""))
    try:
        return bool(host) and is_loopback(host)
    except StoreError:
        return False


def _address_for_others(store: TorchStore, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    try:
        return address_for_others(store, family)
    except ProcessGroupError as error:
        raise RpcError(f"{error}; or give an address as host=") from error


def _own_address(host: str) -> ListenAddress:
    """Returns the first address of a host name that is one of this machine, loopback addresses last."""
    problem = "it has no address"
    for address in sorted(resolve(host), key=is_local):
        try:
            family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.bind(where)
        except OSError as error:
            problem = str(error.strerror)
        else:
            return ListenAddress(address, address)
    raise RpcError(
        f"host is {host!r}, where this worker cannot listen ({problem}): give an address of this machine, or "
        "leave host out"
    )
