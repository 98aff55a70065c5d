"""What a process registers in the store when it joins a group, and the kind of the group."""

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Self, final

from ...errors import RendezvousError
from ...net.exchanged_values import parse_dict, unexpected_value
from ...net.security import printable

__all__ = ["GroupKind", "Registration"]


@cache
def _process_id(_pid: int) -> str:
    """Returns a random id of this process, different in its forks."""
    return uuid.uuid4().hex


@final
@dataclass(frozen=True, slots=True)
class GroupKind:
    """The kind of a group that forms. Groups of different kinds can use one store independently.

    key: part of the store's keys; may be empty.
    how_to_allow: how the caller allows addresses that are not loopback addresses, for messages.
    may_rejoin: whether a process may have the rank of one that was in a group which has formed. It is not
        registered then: the caller finds out what has become of the other one.
    """

    key: str = ""
    how_to_allow: str = "pass insecure=True"
    may_rejoin: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Who a process is in the group that it joins.

    name: of the worker; empty if it has none.
    rank: -1 if not given.
    world_size: -1 if not given, for a dynamic group.
    process: a random id, different for all processes.
    description: of the process, for messages.
    """

    name: str = ""
    rank: int
    world_size: int
    process: str = field(default_factory=lambda: _process_id(os.getpid()))
    description: str = field(default_factory=lambda: f"process {os.getpid()} on {socket.gethostname()}")

    def __str__(self) -> str:
        if self.name:
            return f"{self.name!r} (rank {self.rank}, {self.description})"
        return f"rank {self.rank} ({self.description})"

    @property
    def without_rank(self) -> str:
        """The worker's name and process, for messages that have its rank already."""
        return f"{self.name!r} ({self.description})" if self.name else self.description

    def to_json(self) -> str:
        """Returns the value for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads the result of `to_json`. Raises RendezvousError if `text` is something else."""
        kinds = {"name": str, "rank": int, "world_size": int, "process": str, "description": str}
        try:
            found = parse_dict(text, kinds)
        except ValueError:
            raise RendezvousError(unexpected_value(text, "a worker's registration")) from None
        return cls(**{**found, "name": printable(found["name"]), "description": printable(found["description"])})
