"""A member of the group as the others know it, and how much of the log of the members a worker knows."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from ...errors import WorkerNameError
from ...net.host_identity import network_id
from ...net.user_sockets import UNIX_SCHEME
from .worker import WorkerInfo

__all__ = ["MAX_ID", "Member", "RosterVersion"]

MAX_ID = (1 << 31) - 1

MAX_TEXT_CHARACTERS = 4096
"""Characters of an address, or of another text about a member."""

MAX_SHOWN = 200
"""Characters that are shown of a record that is malformed."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group, with what the other members need to know about it.

    info: its name and id.
    address: at which the others dial its agent: host:port, or unix: and the path of a socket.
    device_count: the number of its CUDA devices.
    network: identifies its network namespace: equal on two workers if they reach each other on the loopback
    address. process: its process and host, for messages. device_maps: by the name of a called worker, which of
    its devices become which of the called worker's. directory: identifies the directory of its unix socket; empty
    if it listens on TCP.
    """

    info: WorkerInfo
    address: str
    device_count: int = field(default_factory=torch.cuda.device_count)
    network: str = field(default_factory=network_id)
    process: str = ""
    device_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    directory: str = ""

    @property
    def has_unix_socket(self) -> bool:
        """Whether it listens on a unix socket, and not on TCP."""
        return self.address.startswith(UNIX_SCHEME)

    @property
    def host(self) -> str:
        """The address without its port, of a worker that listens on TCP."""
        return self.address.rpartition(":")[0].strip("[]")

    def __str__(self) -> str:
        return f"{self.info.name!r} (rank {self.info.id}{self.process and ', ' + self.process})"

    @classmethod
    def from_record(cls, record: Any) -> "Member":
        """Returns the member that `dataclasses.asdict` has made a record of. Raises ValueError if it is none."""
        try:
            member = cls(**{**record, "info": WorkerInfo(**record["info"])})
        except (TypeError, KeyError, AttributeError, WorkerNameError) as error:
            raise ValueError(f"it describes no worker: {str(error)[:MAX_SHOWN]}") from None
        if not member._is_sound():
            raise ValueError(f"it describes no worker: {str(record)[:MAX_SHOWN]!r}")
        return member

    def _is_sound(self) -> bool:
        """Returns whether what another worker has told has the right types and limits."""
        return (
            all(type(each) is int and 0 <= each <= MAX_ID for each in (self.info.id, self.info.wire_id))
            and bool(self.address)
            and all(map(_is_text, (self.address, self.network, self.process, self.directory)))
            and type(self.device_count) is int
            and isinstance(self.device_maps, dict)
            and all(_is_device_map(each) for each in self.device_maps.values())
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS and (value.isprintable() or not value)


def _is_device_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(device, str) for device in value.values())


@final
@dataclass(frozen=True, slots=True)
class RosterVersion:
    """How much of the log of joins, leaves and evictions a worker knows: tells whether two know the same entries.

    length: the number of entries.
    digest: 32 bytes, of all of them in order.
    """

    length: int = 0
    digest: bytes = bytes(32)

    def followed_by(self, text: str) -> "RosterVersion":
        """Returns the version with one more entry."""
        return RosterVersion(self.length + 1, hashlib.sha256(self.digest + text.encode()).digest())
