"""Which ranks can share memory, which share a network, and at which address other hosts reach this process.

Sharing memory and sharing a network are independent: containers on one machine may share either without the other.
"""

import errno
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
from typing import Self, final

from ..errors import ProcessGroupError, StoreError
from .addresses import INSECURE_VARIABLE, is_numeric, resolve
from .exchanged_values import parse_list, unexpected_value
from .listening import ADVERTISED_VARIABLE, ANY_PORT, HOST_VARIABLE, ListenSettings
from .stores.describe import innermost_store
from .torch_types import TorchStore

__all__ = [
    "INTERFACE_VARIABLE",
    "LOOPBACK",
    "HostIdentity",
    "address_for_others",
    "can_share_loopback",
    "can_share_memory",
    "gather_consenting_hosts",
    "gather_hosts",
    "insecure_problem",
    "interface_addresses",
    "is_local",
    "listen",
    "network_id",
    "own_address",
]

LOOPBACK = "127.0.0.1"

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names Gloo's network interfaces. All else in gradwire uses the first of them."""

REFUSAL_TIMEOUT_S = 5.0
"""Seconds for which rank 0 waits until the other ranks know why there is no group."""

_UNASSIGNED_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation (RFC 5737, RFC 3849), to find the default route. Nothing is sent there."""

_SIOCGIFADDR = 0x8915
"""The ioctl that returns an interface's IPv4 address; see netdevice(7)."""


@final
@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Where a process runs.

    memory: equal for two processes if and only if they can share memory.
    network: equal for two processes if and only if they reach each other on the loopback address.
    insecure: whether the process allows connections to other hosts and users without credentials.
    user: as which the process runs.
    """

    memory: str
    network: str
    insecure: bool = False
    user: int = -1

    @classmethod
    def here(cls, *, insecure: bool = False) -> Self:
        """Returns the identity of this process's host."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid, user, network = (os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "user", "net"))
        memory = f"{boot} "
        # gradwire's shared memory has no name, but is opened through /proc; MPI's is in /dev/shm.
        with suppress(OSError):
            memory = f"{boot} /dev/shm:[{os.stat('/dev/shm').st_dev}] "
        return cls(f"{memory}{pid} {user} user {os.geteuid()}", f"{boot} {network}", insecure, os.geteuid())

    def to_json(self) -> str:
        """Returns the value for the store."""
        return json.dumps(astuple(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads the result of `to_json`.

        Raises:
            ProcessGroupError: `text` is something else.
        """
        try:
            return cls(*parse_list(text, str, str, bool, int))
        except ValueError:
            raise ProcessGroupError(unexpected_value(text, "the identity of a rank's host")) from None


def can_share_memory(hosts: Sequence[HostIdentity]) -> bool:
    """Returns whether all processes on these hosts can share memory."""
    return len({host.memory for host in hosts}) == 1


def can_share_loopback(hosts: Sequence[HostIdentity]) -> bool:
    """Returns whether all processes on these hosts reach each other on the loopback address."""
    return len({host.network for host in hosts}) == 1


def gather_hosts(
    store: TorchStore, rank: int, size: int, timeout_s: float | None = None, *, insecure: bool = False
) -> list[HostIdentity]:
    """Returns `HostIdentity.here()` of every rank. All ranks must call it, once for a store.

    Args:
        store: shared by the ranks.
        rank: this process's rank.
        size: the number of ranks.
        timeout_s: seconds to wait for the other ranks; None for the store's timeout.
        insecure: whether this rank allows connections to other hosts without credentials.
    """
    store.set(f"host/{rank}", HostIdentity.here(insecure=insecure).to_json())
    keys = [f"host/{other}" for other in range(size)]
    if timeout_s is not None:
        store.wait(keys, timedelta(seconds=timeout_s))
    return [HostIdentity.from_json(store.get(key)) for key in keys]


def insecure_problem(hosts: Sequence[HostIdentity], what: str, ranks: Sequence[int] = ()) -> str:
    """Returns why ranks must not be connected without credentials; empty if they may be.

    On several hosts, or as several users of one, all of them must allow it.

    Args:
        hosts: those of the ranks.
        what: connects them, for the message.
        ranks: to which the hosts belong; 0, 1 and so on by default.

    Returns:
        The same on all ranks; empty if they may be connected.
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
    store: TorchStore, rank: int, size: int, timeout_s: float, *, insecure: bool, what: str
) -> list[HostIdentity]:
    """Returns the same as `gather_hosts`, for ranks that are to be connected without credentials.

    Args:
        store: shared by the ranks.
        rank: this process's rank.
        size: the number of ranks.
        timeout_s: seconds to wait for the other ranks.
        insecure: whether this rank allows connections to other hosts without credentials.
        what: connects the ranks, for the message.

    Raises:
        ProcessGroupError: the ranks are on several hosts, and not all of them allow it; raised on all ranks.
    """
    hosts = gather_hosts(store, rank, size, timeout_s, insecure=insecure)
    if problem := insecure_problem(hosts, what):
        # Rank 0 may host the store, which ends with this error: the others must have read why by then.
        with suppress(RuntimeError):
            store.set(f"refused/{rank}", "")
            if rank == 0:
                store.wait([f"refused/{other}" for other in range(size)], timedelta(seconds=REFUSAL_TIMEOUT_S))
        raise ProcessGroupError(problem)
    return hosts


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
        bind = address_for_others(store)
    elif is_numeric(host) and ipaddress.ip_address(host).is_unspecified:
        bind, advertised = host, advertised or address_for_others(store)
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


def network_id() -> str:
    """Returns `HostIdentity.here().network`; the host's name where there is no /proc."""
    try:
        return HostIdentity.here().network
    except OSError:  # without /proc a host has one network
        return socket.gethostname()


def address_for_others(store: TorchStore | None = None, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Returns the address at which processes on other hosts reach this host.

    That is the address of the first interface in GLOO_SOCKET_IFNAME, if it is set. Otherwise it is the first of
    these that is not a loopback address: the local address of the route to the store, if that is a TCPStore; of
    the route to this host's name; of the default route; the address of any interface. If there is none, it is the
    loopback address.

    Args:
        store: the store through which the group forms, if there is one.
        family: AF_INET or AF_INET6, if the address must be of that family.

    Raises:
        ProcessGroupError: GLOO_SOCKET_IFNAME names an interface that has no address.
    """
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    if interface:
        return _interface_address(interface)
    for destination in (_store_host(store), socket.gethostname(), *_UNASSIGNED_ADDRESSES):
        with suppress(OSError, UnicodeError):  # an unknown name, or no route
            found = socket.getaddrinfo(destination, 9, family, socket.SOCK_DGRAM) if destination else ()
            for found_family, kind, _, _, remote in found:
                with socket.socket(found_family, kind) as probe:
                    probe.connect(remote)  # on a UDP socket: looks up the route, and sends nothing
                    address = str(probe.getsockname()[0])
                if not is_local(address):
                    return address
    if family != socket.AF_INET6:
        others = (address for address in interface_addresses().values() if not is_local(address))
        return next(others, LOOPBACK)
    return LOOPBACK


def interface_addresses() -> dict[str, str]:
    """Returns the IPv4 address of each network interface that has one, by the interface's name."""
    found = {}
    for _, name in socket.if_nameindex():
        with suppress(ProcessGroupError):
            found[name] = _interface_address(name)
    return found


def is_local(address: str) -> bool:
    """Returns whether a numeric address is a loopback or link-local one, which is not valid on other hosts."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or (parsed.version == 6 and parsed.is_link_local)


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        except OSError as error:
            interfaces = ", ".join(each for _, each in socket.if_nameindex())
            raise ProcessGroupError(
                f"{INTERFACE_VARIABLE} names the interface {name!r}, which has no IPv4 address on this host "
                f"({error.strerror}): set it to one of {interfaces}, or unset it"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _store_host(store: TorchStore | None) -> str:
    """Returns the host of a TCPStore, gradwire's or torch's, possibly under prefixes; empty for other stores."""
    return str(getattr(innermost_store(store), "host", ""))
