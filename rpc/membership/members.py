"""The members of a group: how those of a static group find each other through a store, and their device maps."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch

from ...c10d.rendezvous.start_barrier import StartBarrier
from ...errors import DeviceMapError
from ...net.host_identity import network_id
from ..contracts.devices import DeviceMap
from ..contracts.worker import Member

__all__ = [
    "check_device_maps",
    "device_maps_as_text",
    "exchange_members",
    "formed_group",
    "introduce",
]

MAX_SHOWN = 200
"""Characters that are shown of a record that is malformed."""


def introduce(barrier: StartBarrier, directory: str, seconds: float) -> tuple[str, list[tuple[str, str]]]:
    """Waits until all workers have registered at a barrier, and checks that their names are unique.

    Returns:
        The name of the group, unique among all groups; and by rank the network names and directories of the
        workers. The directory of a worker identifies that of its unix sockets, and is empty if it can have none.

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


def exchange_members(
    barrier: StartBarrier, me: Member, check: Callable[[Sequence[Member]], str], seconds: float
) -> list[Member]:
    """Publishes this worker as a member, after `introduce`, and returns all members by rank.

    `check` returns what is wrong with all members, on one or several workers. If something is, or some members do
    not arrive in time, all workers raise the same RendezvousError.
    """

    def check_records(records: list[bytes]) -> str:
        try:
            return check(_members(records))
        except (ValueError, RecursionError) as error:
            return f"what a rank tells of itself is malformed: {error}"

    return _members(barrier.wait(json.dumps(asdict(me)), seconds, check_records))


def _members(records: Sequence[bytes]) -> list[Member]:
    """Returns the members of a new group by rank. Raises ValueError if records are malformed or contradictory."""
    members = [Member.from_record(json.loads(record)) for record in records]
    for rank, member in enumerate(members):
        if not member.info.wire_id == member.info.id == rank:
            raise ValueError(f"rank {rank} says that it is {member.info}")
    if len({member.info.name for member in members}) < len(members):
        raise ValueError("several have one name")
    return members


def formed_group(barrier: StartBarrier) -> tuple[str, list[Member]] | None:
    """Returns the name and the members of the group that has formed at a barrier last; None if none has."""
    rounds = barrier.former_records()
    try:
        members = _members(next(rounds))
        group = json.loads(next(rounds)[0])[0]
    except (StopIteration, ValueError, TypeError, LookupError, RecursionError):
        return None
    return str(group), members


def device_maps_as_text(device_maps: Mapping[str, DeviceMap]) -> dict[str, dict[str, str]]:
    """Returns a worker's device maps with the names of devices, as members exchange them."""
    return {
        to: {str(device): str(target) for device, target in device_map.items()}
        for to, device_map in device_maps.items()
    }


def check_device_maps(members: Sequence[Member], group: Sequence[Member], *, dynamic: bool = False) -> None:
    """Checks that the device maps of members name workers of the group and CUDA devices that exist.

    In a dynamic group, a device map may name a worker that has not joined yet. All workers that check the same
    members raise the same DeviceMapError.
    """
    counts = {member.info.name: member.device_count for member in group}
    for member in members:
        for to, device_map in member.device_maps.items():
            if to not in counts and not dynamic:
                raise DeviceMapError(
                    f"Node {member.info.name} has invalid target node names in its device maps: {to!r} is not one "
                    f"of {', '.join(counts)}"
                )
            for side, worker, devices in (
                ("source", member.info.name, device_map.keys()),
                ("target", to, device_map.values()),
            ):
                for device in map(torch.device, devices):
                    if device.type == "cuda" and worker in counts and device.index >= counts[worker]:
                        raise DeviceMapError(
                            f"Node {member.info.name} has {side} devices with invalid indices in its device map "
                            f"for {to}: {worker} has no {device}, it has {counts[worker]} CUDA devices"
                        )
