"""On which hosts the ranks of a group are, where they listen for each other, and whether they may be connected."""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from ...errors import ProcessGroupError, StoreError
from ...net.addresses import (
    ADVERTISED_VARIABLE,
    HOST_VARIABLE,
    INSECURE_VARIABLE,
    LOOPBACK,
    ListenSettings,
    address_for_others,
    is_local,
    is_numeric,
    own_address,
)
from ...net.host_identity import HostIdentity, can_share_loopback
from ..stores.views import store_host
from ..torch_types import TorchStore

__all__ = ["gather_consenting_hosts", "gather_hosts", "insecure_problem", "linger", "listen"]

REFUSAL_TIMEOUT_S = 5.0
"""Seconds for which rank 0 waits until the other ranks know why there is no group."""


def gather_hosts(
    store: TorchStore, rank: int, size: int, wait: Callable[[list[str]], object], *, insecure: bool = False
) -> list[HostIdentity]:
    """Returns `HostIdentity.here()` of every rank. All ranks must call it, once for a store.

    `wait` waits until the store has keys, of which rank i sets the i-th. `insecure` says whether this rank allows
    connections to other hosts without credentials.
    """
    store.set(f"host/{rank}", HostIdentity.here(insecure=insecure).to_json())
    keys = [f"host/{other}" for other in range(size)]
    wait(keys)
    return [HostIdentity.from_json(store.get(key)) for key in keys]


def insecure_problem(hosts: Sequence[HostIdentity], what: str, ranks: Sequence[int] = ()) -> str:
    """Returns why ranks must not be connected without credentials; empty if they may be.

    On several hosts, or as several users of one, all of them must allow it. Returns the same on all ranks. `what`
    names what connects them. The hosts are those of these ranks; of ranks 0, 1 and so on if none are given.
    """
    pairs = zip(ranks or range(len(hosts)), hosts, strict=True)
    refusing = [str(rank) for rank, host in pairs if not host.insecure]
    users = sorted({host.user for host in hosts})
    if not refusing or (can_share_loopback(hosts) and len(users) == 1):
        return ""
    why = "are on several hosts (or in containers with networks of their own)"
    if can_share_loopback(hosts):
        why = f"run as several users of one host ({', '.join(map(str, users))})"
    return (
        f"the ranks {why}, and {what} connects them without encryption and authentication, so anyone there could "
        f"take part. On a network that you trust, pass insecure=True to gradwire.c10d.init_process_group, or set "
        f"{INSECURE_VARIABLE}=1 in the environment, on every rank; not allowed by: rank {', '.join(refusing)}"
    )


def gather_consenting_hosts(
    store: TorchStore, rank: int, size: int, wait: Callable[[list[str]], object], *, insecure: bool, what: str
) -> list[HostIdentity]:
    """Returns the same as `gather_hosts`, for ranks that are to be connected without credentials.

    Args:
        store: shared by the ranks.
        rank: this process's rank.
        size: the number of ranks.
        wait: waits until the store has keys, of which rank i sets the i-th: `setup.wait_for_keys` of an engine.
        insecure: whether this rank allows connections to other hosts without credentials.
        what: connects the ranks, for the message.

    Raises:
        ProcessGroupError: the ranks are on several hosts, and not all of them allow it; raised on all ranks.
    """
    hosts = gather_hosts(store, rank, size, wait, insecure=insecure)
    if problem := insecure_problem(hosts, what):
        linger(store, "refused", rank, size, REFUSAL_TIMEOUT_S)
        raise ProcessGroupError(problem)
    return hosts


def linger(store: TorchStore, key: str, rank: int, size: int, timeout_s: float) -> None:
    """Notes that this rank knows why there is no group. Rank 0 waits until all do: it may host the store."""
    with suppress(RuntimeError):  # they may never come
        store.set(f"{key}/{rank}", "")
        if rank == 0:
            store.wait([f"{key}/{other}" for other in range(size)], timedelta(seconds=timeout_s))


def listen(hosts: Sequence[HostIdentity], store: TorchStore) -> tuple[socket.socket, str]:
    """Opens a listening socket for the ranks on these hosts. Returns it, and the address to connect to.

    If all hosts share the loopback address, the socket listens there, and nobody else can reach it. Otherwise
    GRADWIRE_HOST and GRADWIRE_ADVERTISED_HOST may say other addresses. GRADWIRE_PORTS says which ports.

    Raises:
        ProcessGroupError: GRADWIRE_HOST is no address of this host, or none that other hosts reach.
        OSError: no port is free.
    """
    settings = ListenSettings.from_environment()
    if can_share_loopback(hosts):
        return settings.ports.listen(LOOPBACK), LOOPBACK
    host, advertised = settings.host, settings.advertised_host
    if host is None:
        bind = address_for_others(store_host(store))
    elif is_numeric(host) and ipaddress.ip_address(host).is_unspecified:
        bind, advertised = host, advertised or address_for_others(store_host(store))
    else:
        bind = _chosen_address(host, is_dialled=advertised is None)
    return settings.ports.listen(bind), advertised or bind


def _chosen_address(host: str, *, is_dialled: bool) -> str:
    """Returns the address of GRADWIRE_HOST. Raises ProcessGroupError if it is of no use."""
    try:
        address = own_address(host)
    except (OSError, StoreError) as error:
        problem = f"where this process cannot listen ({getattr(error, 'strerror', None) or error})"
        raise ProcessGroupError(
            f"{HOST_VARIABLE} is {host!r}, {problem}: give an address of this machine"
        ) from error
    if is_dialled and is_local(address):
        raise ProcessGroupError(
            f"{HOST_VARIABLE} is {host!r}, here {address}, which only processes of this host reach: give an "
            f"address that the other hosts reach, or say by {ADVERTISED_VARIABLE} what they dial"
        )
    return address
