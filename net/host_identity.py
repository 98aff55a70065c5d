"""Which processes can share memory, and which share a network.

The two are independent: containers on one machine may share either without the other.
"""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self, final

from ..errors import ProcessGroupError
from .exchanged_values import parse_list, unexpected_value

__all__ = ["HostIdentity", "can_share_loopback", "can_share_memory", "network_id"]


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


def network_id() -> str:
    """Returns `HostIdentity.here().network`; the host's name where there is no /proc."""
    try:
        return HostIdentity.here().network
    except OSError:  # without /proc a host has one network
        return socket.gethostname()
