"""Where workers listen, whether they can reach each other, and whether one of them lives."""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import final

from ...c10d.stores.views import store_host
from ...c10d.torch_types import TorchStore
from ...errors import ProcessGroupError, RpcError, StoreError
from ...net.addresses import (
    ANY_PORT,
    LOOPBACK,
    PortRange,
    address_for_others,
    is_local,
    is_loopback,
    is_numeric,
    is_tcp_address,
    own_address,
    resolve,
)
from ...net.host_identity import network_id
from ...net.user_sockets import UNIX_SCHEME, SocketDirectory, UnsafePathError
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import Member

__all__ = [
    "ListenAddress",
    "Presence",
    "check_consent",
    "choose_address",
    "connectable",
    "find_directory",
    "identity",
    "presence_of",
    "unreachable_members",
]

PROBE_TIMEOUT_S = 5.0
"""Seconds that a member may take to answer, when a worker that wants its name checks that it lives."""

_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)
"""What a gRPC client says first. Whatever listens answers it, or hangs up."""


@final
@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a worker listens, and which addresses it dials.

    directory: of the unix socket of its server; None if that listens on TCP.
    bind: the numeric address to listen on by TCP; may be a wildcard.
    advertised: the numeric address that the other members dial.
    any_host: whether it dials TCP addresses of other hosts.
    ports: on which it listens by TCP.
    """

    directory: SocketDirectory | None
    bind: str = LOOPBACK
    advertised: str = LOOPBACK
    any_host: bool = False
    ports: PortRange = ANY_PORT

    def reach(self, address: str) -> str:
        """Checks the address of another worker, which may be forged, and returns the one to dial.

        Raises:
            UnsafePathError: it is not where a worker can be, or others than this user may listen there.
            FileNotFoundError: nobody listens there.
        """
        if self.directory is not None:
            if not address.startswith(UNIX_SCHEME):
                raise UnsafePathError(
                    f"{address!r} is no unix socket, and a worker that has one connects to nothing else: "
                    "somebody has forged an entry of the store, or only some workers have insecure=True or host="
                )
            return UNIX_SCHEME + self.directory.reach(address.removeprefix(UNIX_SCHEME))
        if not is_tcp_address(address):  # gRPC knows other kinds, some of which it would not encrypt
            raise UnsafePathError(f"{address!r} is no numeric address and port")
        if not self.any_host and not _is_loopback_address(address):
            raise UnsafePathError(f"{address!r} is not a loopback address, as it has to be without insecure=True")
        return address

    def clean_up(self, address: str) -> None:
        """Removes the unix socket of a worker whose process seems to have ended, if nobody listens there."""
        if self.directory is not None and address.startswith(UNIX_SCHEME):
            self.directory.remove_if_dead(address.removeprefix(UNIX_SCHEME))


def check_consent(options: RpcBackendOptions) -> None:
    """Raises RpcError for a `host` that other users or machines can reach, unless the options allow that."""
    host = options.find_listening().host
    if host is None or _may_use_tcp(options):
        return
    try:
        who = "every user of this host" if is_loopback(host) else "other machines"
    except StoreError as error:
        raise RpcError(f"host is {host!r}: {error}") from error
    raise RpcError(
        f"host is {host!r}, which {who} can reach, and anybody who reaches a worker can run code in it: leave "
        f"host out, or, on a network that you trust, {options.CONSENT}"
    )


def find_directory(options: RpcBackendOptions) -> SocketDirectory | None:
    """Returns the directory in which a worker with these options can have a unix socket; None to use TCP.

    Raises RpcError if there can be no such directory, and the options do not allow TCP.
    """
    if options.find_listening().host is not None:
        return None
    try:
        directory = SocketDirectory.of_this_user()
        directory.sweep()
        return directory
    except UnsafePathError as error:
        if _may_use_tcp(options):
            return None
        raise RpcError(f"{error}; or {options.CONSENT}, and any user of the host can run code in it") from error


def identity(directory: SocketDirectory | None) -> str:
    """Returns what identifies a directory of sockets; empty without one."""
    return directory.identity if directory is not None else ""


def choose_address(
    options: RpcBackendOptions,
    store: TorchStore,
    directory: SocketDirectory | None,
    places: Sequence[tuple[str, str]] | None,
) -> ListenAddress:
    """Returns where a worker is to listen, with or without the directory that `find_directory` returns.

    Without a `host` that is a unix socket, unless the options allow others and some members do not share network
    and directory, or are not known. Then it is the loopback address on one host, else the address by which this
    host reaches the store, or that others reach (`net.addresses.address_for_others`). The `places` are the
    network names and directories of all members; None if they are not known, as in a dynamic group. Raises
    RpcError if the `host` is not an address of this machine, or the `advertised_host` has none.
    """
    settings, any_host = options.find_listening(), _may_use_tcp(options)
    host = settings.host
    if host is None:
        if directory is not None and (not any_host or (places is not None and len(set(places)) == 1)):
            return ListenAddress(directory)
        is_one_host = _is_local_store(store) if places is None else len({network for network, _ in places}) == 1
        bind = advertised = LOOPBACK if is_one_host else _address_for_others(store)
    elif is_numeric(host) and ipaddress.ip_address(host).is_unspecified:
        family = socket.AF_INET if ":" not in host else socket.AF_UNSPEC  # "::" takes both
        bind, advertised = host, settings.advertised_host or _address_for_others(store, family)
    else:
        bind = advertised = _own_address(host)
    if settings.advertised_host is not None:
        advertised = _first_address(settings.advertised_host)
    return ListenAddress(None, bind, advertised, any_host, settings.ports)


def unreachable_members(members: Sequence[Member], consent: str) -> str:
    """Returns an error message that names the members which others cannot reach; empty if there are none.

    `consent` says how users allow addresses that other hosts and users reach.
    """
    networks = {member.network for member in members}
    directories = {member.directory if member.has_unix_socket else "" for member in members}
    if len(networks) <= 1 and len(directories) <= 1:
        return ""
    hidden = [each for each in members if each.has_unix_socket or (len(networks) > 1 and is_local(each.host))]
    if not hidden:
        return ""
    if len(networks) > 1:
        why = "are on several hosts (or in containers with networks of their own)"
    elif "" in directories:
        why = "were started with different options: some have unix sockets, and others insecure=True or host="
    else:
        why = (
            "share no directory for their sockets (they run as several users, in containers with file systems of "
            f"their own, or with several XDG_RUNTIME_DIR): {', '.join(sorted(directories))}"
        )
    shown = ", ".join(f"{each} on {each.address}" for each in hidden[:8]) + ", …" * (len(hidden) > 8)
    return (
        f"the workers {why}, where the others cannot reach those that listen for their own host and user only: "
        f"{shown}. On every worker set GRADWIRE_TOKEN to the same token; or {consent}, which lets anybody who "
        "reaches a worker run code in it, so the network must be one that you trust. Give host= only where a "
        "worker has to be told which of its addresses the others reach"
    )


def connectable(members: Sequence[Member], *, insecure: bool) -> Callable[[Iterable[int]], bool]:
    """Returns a function that says whether the workers with some ids may form a process group.

    Nothing encrypts or authenticates the data of Gloo. So between hosts workers form no process groups, unless
    `insecure` allows it; without them, everything goes by connections that credentials do protect. Nor are those
    who join later than these members in any.
    """
    network_of = {member.info.wire_id: member.network for member in members}

    def may_form(workers: Iterable[int]) -> bool:
        networks = {network_of.get(worker) for worker in workers}
        return None not in networks and (insecure or len(networks) == 1)

    return may_form


class Presence(Enum):
    """What is known of a member."""

    ALIVE = auto()
    """It answers, or cannot be asked from here."""
    SILENT = auto()
    """It does not answer, and its process may live."""
    GONE = auto()
    """Its process has ended: nobody listens at its address."""


def presence_of(member: Member, where: ListenAddress, seconds: float = PROBE_TIMEOUT_S) -> Presence:
    """Returns what can be found out of a member in some seconds, by a worker that listens at `where`."""
    is_here = member.network == network_id() and member.directory == identity(where.directory)
    if not is_here and (member.has_unix_socket or is_local(member.host)):
        return Presence.ALIVE  # as far as can be told: elsewhere its address means something else
    try:
        with _connect(where.reach(member.address), seconds) as connection:
            connection.sendall(_OPENING)
            connection.recv(1)
    except (ConnectionRefusedError, FileNotFoundError):
        return Presence.GONE
    except (ConnectionResetError, BrokenPipeError):
        return Presence.ALIVE
    except OSError:
        return Presence.SILENT
    return Presence.ALIVE


def _may_use_tcp(options: RpcBackendOptions) -> bool:
    """Returns whether the options allow addresses that other hosts or users reach."""
    return options.insecure or options.find_credentials() is not None


def _is_local_store(store: TorchStore) -> bool:
    """Returns whether only processes of this host can reach the store."""
    host = store_host(store)
    try:
        return bool(host) and is_loopback(host)
    except StoreError:
        return False


def _address_for_others(store: TorchStore, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    try:
        return address_for_others(store_host(store), family)
    except ProcessGroupError as error:
        raise RpcError(f"{error}; or give an address as host=") from error


def _is_loopback_address(address: str) -> bool:
    """Returns whether host:port has a numeric loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    return is_numeric(host) and ipaddress.ip_address(host).is_loopback


def _first_address(host: str) -> str:
    """Returns the first address of a host name, which may be another machine's; addresses of this one last."""
    try:
        return min(resolve(host), key=is_local)
    except StoreError as error:
        raise RpcError(f"advertised_host is {host!r}: {error}") from error


def _own_address(host: str) -> str:
    try:
        return own_address(host)
    except OSError as error:
        raise RpcError(
            f"host is {host!r}, where this worker cannot listen ({error.strerror}): give an address of this "
            "machine, or leave host out"
        ) from error


def _connect(target: str, seconds: float) -> socket.socket:
    if not target.startswith(UNIX_SCHEME):
        host, _, port = target.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), seconds)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    try:
        connection.connect(target.removeprefix(UNIX_SCHEME))
    except BaseException:
        connection.close()
        raise
    return connection
