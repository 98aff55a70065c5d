"""What a child of fork() does with what it inherits of gradwire: it uses none of it, and keeps no connection open.

A child has the memory and the descriptors of its parent, and of its threads only the one that has forked. So locks
that other threads held stay locked, nothing answers, and a connection that the child kept open would look alive to
its peer when the parent has died. Therefore this module, by gradwire's only hook on forks, tells what a child may
run into, and replaces the connections in the child.

The connections include those of gRPC, which tells nobody of its descriptors. They are known by their addresses:
see `note_listener` and `note_peer`. A descriptor is not closed, but leads to /dev/null from then on: objects that
have its number would shut down, or close, what the child opens next.

gRPC's threads do not survive a fork either. In a child nothing of it works: what the child makes waits for ever or
ends the child by a signal, and so does what it frees, as a garbage collection or the end of the child would. So
children keep the servers and channels of their parent for ever, and learn that they can make none.
"""

import ctypes
import gc
import ipaddress
import logging
import os
import re
import socket
import weakref
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from .user_sockets import is_socket_path

__all__ = [
    "ABSTRACT_PREFIX",
    "at_fork",
    "keep_in_children",
    "note_grpc",
    "note_listener",
    "note_peer",
    "replace",
    "why_grpc_is_unusable",
]

ABSTRACT_PREFIX: Final = "gradwire-"
"""What the names of unix sockets in the abstract namespace begin with, after the null byte."""

_DESCRIPTORS: Final = "/proc/self/fd"
_MEMORY: Final = re.compile(r"/memfd:(gradwire|pulse-of-gradwire)( \(deleted\))?")
"""Where the descriptors of segments of shared memory lead, and of counters, that are sent to other processes."""

_lasting: weakref.WeakSet[Any] = weakref.WeakSet()
"""What children never free."""

_has_lasting = False
"""Whether this process has made such an object, which may wait for a garbage collection by now."""

_grpc_user: int | None = None
"""The process, this one or one that it was forked from, that has used gRPC first."""

_kept: list[object] = []
"""In a child, what it keeps of its parent's."""

_before: list[Callable[[], None]] = []
_in_child: list[Callable[[], None]] = []

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Address(NamedTuple):
    """The address of one end of TCP connections: a numeric host, or "" for all addresses of this host."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> "_Address":
        """Returns an address in the one way in which it is compared; a name counts as all addresses."""
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return cls("", port)
        plain = getattr(address, "ipv4_mapped", None) or address
        return cls("" if plain.is_unspecified else str(plain), port)


_Addresses = weakref.WeakKeyDictionary[object, frozenset[_Address]]
"""By whoever listens there, or has connected to there."""

_listeners, _peers = _Addresses(), _Addresses()


def at_fork(*, before: Callable[[], None] | None = None, in_child: Callable[[], None] | None = None) -> None:
    """Has functions called at each fork of this process, from now on, in the parent before it, or in the child.

    They must take no lock.
    """
    if before is not None:
        _before.append(before)
    if in_child is not None:
        _in_child.append(in_child)


def note_listener(owner: object, port: int, *hosts: str) -> None:
    """Notes that connections to an object which listens at these addresses, or wildcards, are not for children."""
    _listeners[owner] = frozenset(_Address.of(host, port) for host in hosts)


def note_peer(owner: object, port: int, *hosts: str) -> None:
    """Notes that the connections of an object to these addresses of another process are not for children."""
    _peers[owner] = frozenset(_Address.of(host, port) for host in hosts)


def keep_in_children(made: T) -> T:
    """Has children never free an object whose end needs threads that they lack, as in gRPC. Returns the object."""
    global _has_lasting  # noqa: PLW0603
    _has_lasting = True
    _lasting.add(made)
    return made


def note_grpc(made: T) -> T:
    """Notes a server or a channel of gRPC that this process has made, and returns it."""
    global _grpc_user  # noqa: PLW0603 - a process has one gRPC
    if _grpc_user is None:
        _grpc_user = os.getpid()
    return keep_in_children(made)


def why_grpc_is_unusable() -> str:
    """Returns why this process cannot use gRPC; empty if it can."""
    if _grpc_user in (None, os.getpid()):
        return ""
    return (
        f"process {_grpc_user}, from which this process {os.getpid()} was forked, has used gRPC, which cannot be "
        "used in a fork then: start processes with spawn or forkserver"
    )


def replace(descriptor: int) -> None:
    """Has a descriptor lead to /dev/null, in a child. Raises OSError."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nothing, descriptor, inheritable=False)
    finally:
        os.close(nothing)


def _prepare() -> None:
    for function in _before:
        function()


def _leave_to_parent() -> None:
    """Tells all that is to know of it that this process is a child, and replaces the descriptors."""
    _keep_lasting_objects()
    for function in _in_child:
        try:
            function()
        except Exception:
            log.exception("a part of gradwire cannot be left to the parent of this process")
    with suppress(OSError):  # no descriptor is left, or there is no /proc
        _replace_connections()


def _keep_lasting_objects() -> None:
    """Has neither garbage collections nor the end of the process free what must not be freed here."""
    if not _has_lasting:
        return
    _kept.extend(_lasting)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))  # also when the modules are cleared, at exit
    gc.freeze()  # parts of gRPC's objects wait in reference cycles for a garbage collection


def _replace_connections() -> None:
    listeners, peers = (
        frozenset[_Address]().union(*_listeners.values()),
        frozenset[_Address]().union(*_peers.values()),
    )
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # the descriptor of the list is closed
            if _is_for_parent(int(name), listeners, peers):
                replace(int(name))


def _is_for_parent(descriptor: int, listeners: Set[_Address], peers: Set[_Address]) -> bool:
    """Returns whether a descriptor is a listener or a connection of gradwire, or is to be sent to a process."""
    kind = os.readlink(f"{_DESCRIPTORS}/{descriptor}")
    if not kind.startswith("socket:"):
        return _MEMORY.fullmatch(kind) is not None
    found = socket.socket(fileno=descriptor)
    try:
        here, there = found.getsockname(), None
        with suppress(OSError):  # it is not connected
            there = found.getpeername()
        if found.family == socket.AF_UNIX:
            return _is_of_gradwire(here) or _is_of_gradwire(there)
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        mine = _Address.of(*here[:2])
        is_accepted = mine in listeners or _Address("", mine.port) in listeners
        return is_accepted or (there is not None and _Address.of(*there[:2]) in peers)
    finally:
        found.detach()


def _is_of_gradwire(name: object) -> bool:
    """Returns whether this is the name of a unix socket that workers connect by."""
    if isinstance(name, bytes):
        return name.startswith(b"\0" + ABSTRACT_PREFIX.encode())
    return isinstance(name, str) and is_socket_path(name)


os.register_at_fork(before=_prepare, after_in_child=_leave_to_parent)
