"""The members of a group, and how those of a static group find each other through a store."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...c10d.host_identity import network_id
from ...c10d.start_barrier import StartBarrier
from ...c10d.user_sockets import UNIX_SCHEME
from ...errors import WorkerNameError
from ..contracts.worker import WorkerInfo

__all__ = ["Member", "MemberCheck", "exchange_members", "formed_group", "introduce"]

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


MemberCheck = Callable[[Sequence[Member]], str]
"""Checks all members; returns what is wrong with them, or an empty text."""


def introduce(barrier: StartBarrier, directory: str, seconds: float) -> tuple[str, list[tuple[str, str]]]:
    """Waits until all workers have registered, and checks that their names are unique.

    Args:
        barrier: the barrier, at which this worker has registered.
        directory: identifies the directory in which this worker can have unix sockets; empty if there is none.
        seconds: how long to wait.

    Returns:
        The name of the group, unique among all groups; and by rank the network names and directories of the
        workers.

    Raises:
        RendezvousError: workers contradict each other or did not arrive in time; all workers raise the same.
    """
    me = barrier.registration
    holder = barrier.register_name(me.name)
    if holder.process != me.process:
        barrier.fail(
            f"worker name {me.name!r} is not unique: ranks {holder.rank} and {me.rank} have it "
            f"({holder.description}, {me.description}); give each worker a name of its own"
        )
    records = barrier.wait(json.dumps([uuid.uuid4().hex, network_id(), directory]), seconds)
    introductions = []
    for rank, record in enumerate(records):
        try:
            group, network, directory = json.loads(record)
        except (ValueError, TypeError, RecursionError):
            barrier.fail(f"what rank {rank} tells of itself is malformed: {record[:MAX_SHOWN]!r}")
        introductions.append((str(group), str(network), str(directory)))
    return introductions[0][0], [(network, directory) for _, network, directory in introductions]


def exchange_members(barrier: StartBarrier, me: Member, check: MemberCheck, seconds: float) -> list[Member]:
    """Publishes this worker as a member, and returns all members by rank.

    Args:
        barrier: the barrier, which all workers have passed in `introduce`.
        me: this worker.
        check: checks all members. It runs on one or several workers.
        seconds: how long to wait for the other members.

    Raises:
        RendezvousError: the check failed, or some members did not arrive in time; all workers raise the same.
    """

    def check_records(records: list[bytes]) -> str:
        try:
            return check(_members(records))
        except (ValueError, RecursionError) as error:
            return f"what a rank tells of itself is malformed: {error}"

    return _members(barrier.wait(json.dumps(asdict(me)), seconds, check_records))


def _members(records: Sequence[bytes]) -> list[Member]:
    return [Member.from_record(json.loads(record)) for record in records]


def formed_group(barrier: StartBarrier) -> tuple[str, list[Member]] | None:
    """Returns the name and the members of the group that has formed at a barrier last; None if none has."""
    rounds = barrier.former_records()
    try:
        members = _members(next(rounds))
        group = json.loads(next(rounds)[0])[0]
    except (StopIteration, ValueError, TypeError, LookupError, RecursionError):
        return None
    is_sound = all(member.info.wire_id == member.info.id == rank for rank, member in enumerate(members))
    return (str(group), members) if is_sound else None
