"""Which ranks share a host, and so memory."""

import os
import socket
from pathlib import Path

from .torch_types import TorchStore

__all__ = ["hosts_of", "this_host"]


def this_host() -> str:
    """What processes have in common if, and only if, they can share memory: containers on one machine may not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')} user {os.geteuid()}"


def hosts_of(store: TorchStore, rank: int, size: int) -> list[str]:
    """`this_host()` of every rank; all must ask, and do so once for a store."""
    store.set(f"host/{rank}", this_host())
    return [store.get(f"host/{other}").decode() for other in range(size)]
