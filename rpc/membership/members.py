"""How the workers of a static group find each other, through a store."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...c10d.host_identity import network_id
from ...c10d.start_barrier import StartBarrier
from ..contracts.worker import WorkerInfo

__all__ = ["Check", "Member", "exchange_members", "introduce"]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the group.

    address: host:port, at which the others dial its agent. device_count: of CUDA devices.
    network: equal to that of others if, and only if, these reach it on the loopback address.
    process: where it runs, for people.
    device_maps: by the name of another worker, names of devices here and of what they become there.
    """

    info: WorkerInfo
    address: str
    device_count: int = field(default_factory=torch.cuda.device_count)
    network: str = field(default_factory=network_id)
    process: str = ""
    device_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0].strip("[]")

    def __str__(self) -> str:
        return f"{self.info.name!r} (rank {self.info.id}{self.process and ', ' + self.process})"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Member":
        """From what `dataclasses.asdict` made of one."""
        return cls(**{**record, "info": WorkerInfo(**record["info"])})


Check = Callable[[Sequence[Member]], str]
"""What contradicts among all members; empty if nothing does."""


def introduce(barrier: StartBarrier, seconds: float) -> tuple[str, list[str]]:
    """Waits until all workers are there.

    Returns:
        The name of the group, unique among all groups, and the networks of the workers, by rank.

    Raises:
        RendezvousError: they contradict each other, or do not come; all raise the same.
    """
    me = barrier.registration
    holder = barrier.register_name(me.name)
    if holder.process != me.process:
        barrier.fail(
            f"worker name {me.name!r} is not unique: ranks {holder.rank} and {me.rank} have it "
            f"({holder.description}, {me.description}); give each worker a name of its own"
        )
    records = barrier.wait(json.dumps([uuid.uuid4().hex, network_id()]), seconds)
    introductions = [json.loads(record) for record in records]
    return introductions[0][0], [network for _, network in introductions]


def exchange_members(barrier: StartBarrier, me: Member, check: Check, seconds: float) -> list[Member]:
    """Tells the others this worker's address, and learns theirs.

    Args:
        barrier: which all have passed by `introduce`.
        me: this worker.
        check: called by one worker or several.
        seconds: to wait.

    Returns:
        The members, by rank.

    Raises:
        RendezvousError: they contradict each other, or do not come; all raise the same.
    """

    def check_records(records: list[bytes]) -> str:
        return check([Member.from_record(json.loads(record)) for record in records])

    records = barrier.wait(json.dumps(asdict(me)), seconds, check_records)
    return [Member.from_record(json.loads(record)) for record in records]
