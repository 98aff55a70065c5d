"""How workers become members: those of a static group by a store, and others in the place of silent members.

The name, or the rank, of a member that does not answer becomes free for a worker that wants to join. The member
may be dead, or stopped, or out of the reach of this worker only. Those that are connected to it evict it when its
lease is over. If nobody is, the worker that wants its place does, when the member has not answered it for a whole
lease, more than half of the other members could be asked, and none of them vouches for it.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import final

import torch

from ...c10d.rendezvous.start_barrier import StartBarrier
from ...errors import DeviceMapError, RendezvousError
from ...net.host_identity import network_id
from ...net.waiting import wait_with_warnings
from ..contracts.devices import DeviceMap
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import Member
from .addresses import ListenAddress, Presence, presence_of
from .evictions import Verdict, ask_before_joining
from .roster import RosterLog

__all__ = [
    "Vacancy",
    "check_device_maps",
    "device_maps_as_text",
    "exchange_members",
    "formed_group",
    "introduce",
]

MAX_SHOWN = 200
"""Characters that are shown of a record that is malformed."""

POLL_S = 0.2
"""Seconds between looks at the log, and at a member that does not answer."""

ASK_AGAIN_S = 5.0
"""Seconds after which the other members are asked again, if the member was not evicted."""

MAX_STEP_S = 5.0
"""Seconds that count as silence between two looks at a member, at most: this process may have been stopped."""

log = logging.getLogger(__name__)


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


@final
class Vacancy:
    """Waits for the place of one member, on the thread of the worker that wants to join."""

    def __init__(
        self,
        roster: RosterLog,
        where: ListenAddress,
        options: RpcBackendOptions,
        name: str,
        group: Callable[[], str],
    ) -> None:
        """Looks at nothing yet.

        The name is that of this worker and of the member whose place it wants. `group` returns the name of the
        group when the log has been read.
        """
        self._roster = roster
        self._where = where
        self._options = options
        self._name = name
        self._group = group
        self._silent: Member | None = None
        """The member that does not answer."""
        self._left = 0.0
        """Seconds until the others are asked about it."""
        self._looked = 0.0
        """When it did not answer last."""

    def wait(self, seconds: float) -> Member | None:
        """Waits while the member that has the place does not answer, and may live.

        Returns the member, if it is alive or its process has ended; None if it has left or has been evicted.
        Raises RendezvousError if it has not answered and has not been evicted in time.
        """
        found = self._find()
        deadline = time.monotonic() + seconds
        if found is None or presence_of(found, self._where) is not Presence.SILENT:
            return found
        settled = wait_with_warnings(
            self._is_settled,
            max(0.0, deadline - time.monotonic()),
            lambda: f"{self._name!r} waits for {found}, which has its name and does not answer, to be evicted",
        )
        if not settled:
            raise RendezvousError(
                f"{found} does not answer, may live, and has not been evicted within {seconds:g} s, so "
                f"{self._name!r} cannot take its place: end that process first"
            )
        return self._find()

    def _find(self) -> Member | None:
        """Reads the log, and returns the member that has the place; None without one."""
        self._roster.catch_up()
        return self._roster.find(self._name)

    def _is_settled(self, left: float) -> bool:
        """Returns whether the member is silent no more, or no member, within some seconds."""
        end = time.monotonic() + left
        while True:
            current = self._find()
            probe_timeout_s = min(POLL_S, max(0.01, left))
            if current is None or presence_of(current, self._where, probe_timeout_s) is not Presence.SILENT:
                return True
            if self._is_due(current) and presence_of(current, self._where) is Presence.SILENT:
                self._try_to_evict(current)
                self._left = ASK_AGAIN_S
                continue
            if time.monotonic() >= end:
                return False
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))

    def _is_due(self, silent: Member) -> bool:
        """Returns whether a member has not answered for a whole lease, in which this process was not stopped."""
        now = time.monotonic()
        if self._silent is None or self._silent.info != silent.info:
            self._silent, self._left = silent, self._options.liveness.lease
        else:
            self._left -= min(now - self._looked, MAX_STEP_S)
        self._looked = now
        return self._left <= 0

    def _try_to_evict(self, silent: Member) -> None:
        """Evicts a member, if most others can be asked and none of them vouches for it."""
        others = [member for member in self._roster.members() if member.info != silent.info]
        verdict = ask_before_joining(self._name, self._options, self._where, self._group(), silent.info, others)
        if verdict is not Verdict.SILENT:
            log.warning("%s cannot be evicted: %s", silent, verdict.value)
            return
        lease = self._options.liveness.lease
        reason = f"it did not answer {self._name!r}, which wants its place, for {lease:g} s, nor any other member"
        self._roster.evict(silent.info.wire_id, reason, by=None)
