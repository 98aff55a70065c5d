"""The members of a group, and how those of a static group find each other through a store."""

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ...c10d.rendezvous.start_barrier import StartBarrier
from ...net.host_identity import network_id
from ..contracts.member import Member

__all__ = ["MemberCheck", "exchange_members", "formed_group", "introduce"]

MAX_SHOWN = 200
"""Characters that are shown of a record that is malformed."""

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
