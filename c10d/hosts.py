"""Which ranks share a host, and so memory."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from .torch_types import TorchStore

__all__ = ["hosts_of", "listen", "this_host"]


def this_host() -> str:
    """What processes have in common if, and only if, they can share memory: containers on one machine may not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')} user {os.geteuid()}"


def hosts_of(store: TorchStore, rank: int, size: int, seconds: float | None = None) -> list[str]:
    """`this_host()` of every rank; all must ask, and do so once for a store.

    seconds: how long the others may take to ask; None for as long as the store waits.
    """
    store.set(f"host/{rank}", this_host())
    keys = [f"host/{other}" for other in range(size)]
    if seconds is not None:
        store.wait(keys, timedelta(seconds=seconds))
    return [store.get(key).decode() for key in keys]


def listen(hosts: Sequence[str]) -> tuple[socket.socket, str]:
    """A socket that the ranks on these hosts can connect to, and the host name to do it by.

    Only if all are on this host, nobody else can reach it.
    """
    if len(set(hosts)) == 1:
        return socket.create_server(("127.0.0.1", 0)), "127.0.0.1"
    if socket.has_dualstack_ipv6():
        everywhere = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return everywhere, socket.gethostname()
    return socket.create_server(("", 0)), socket.gethostname()
