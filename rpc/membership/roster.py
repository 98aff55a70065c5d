"""The members of a group after some number of joins and leaves: what follows from the log of these.

Nothing here waits, or knows of stores and connections: see roster_log.py for those.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, final

from ...errors import RendezvousError
from ..contracts.worker import MAX_ID, Member, WorkerInfo

__all__ = ["Departed", "Roster", "RosterError"]

MAX_REASON = 500
"""Characters of the reason of a leave or an eviction that are kept."""

MAX_RETIRED = 1 << 22
"""Members that a snapshot may say have left in an epoch. A worker that joins keeps the id of each, in some 300 MB
then; the store would have two entries of the log for each, which are several times as large."""

MAX_DEPARTED = 256
"""Incarnations of which it is known how their membership has ended: the last ones. Of others, the ids are kept."""


class RosterError(RendezvousError):
    """An entry of the log is malformed, contradicts those before it, or is not in the store."""


@final
@dataclass(frozen=True, slots=True)
class Departed:
    """An incarnation of a worker that is a member no longer.

    member: the incarnation. evicted: whether the others have removed it because it did not answer.
    successor: the wire id of the incarnation that has taken its place at its departure, or later; -1 without one.
    reason: why others have removed it; empty if it has left by itself, or was started again.
    """

    member: Member
    reason: str = ""
    evicted: bool = False
    successor: int = -1

    @classmethod
    def from_record(cls, record: Any) -> "Departed":
        """Returns what `dataclasses.asdict` has made a record of. Raises ValueError or TypeError if it is none."""
        end = cls(**{**record, "member": Member.from_record(record["member"])})
        if not isinstance(end.reason, str) or type(end.evicted) is not bool or type(end.successor) is not int:
            raise ValueError(f"it describes no end of a worker: {str(record)[:200]!r}")
        return replace(end, reason=end.reason[:MAX_REASON])

    @property
    def was_removed(self) -> bool:
        """Whether others have ended its membership, so that it is lost even if its process should live."""
        return self.evicted or self.successor != -1 or bool(self.reason)

    @property
    def why(self) -> str:
        """The end in words that go on with "worker 'a' is lost:"."""
        if self.evicted:
            return f"it was evicted: {self.reason}"
        if self.successor != -1:
            return "its process has ended, and another one has its name"
        return self.reason or "it has left"


@final
class Roster:
    """The members after some number of entries of the log.

    A dynamic group begins without members; names and ids are free as long as no member has them, and ids are not
    used again. A static group begins with all its members, whose wire ids are their ranks. Who joins it later is a
    new incarnation of one of them: it has its name and rank, and a wire id that nobody has had.
    """

    def __init__(self, first: Sequence[Member] = ()) -> None:
        """Args: first: the members that have formed a static group; empty for a dynamic group."""
        self.size = len(first)
        """The number of ranks of a static group; 0 for a dynamic one."""
        self.members: dict[int, Member] = {member.info.wire_id: member for member in first}
        """The current members by wire id."""
        self._by_name = {member.info.name: member for member in first}
        """The same by name, which is unique."""
        self.departed: dict[int, Departed] = {}
        """The last MAX_DEPARTED of those that are members no longer, by wire id."""
        self._retired: set[int] = set()
        """The wire ids of all that are members no longer, in this epoch."""
        self.epoch = 0
        """The number of times that the last member of a dynamic group has left. Each epoch is a new group with all
        ids free."""
        self._names = [member.info.name for member in first]

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Applies the next entry of the log.

        Raises:
            ValueError: it describes no member.
            RosterError: it is malformed, or no worker could append it: a member joins whose id or name another one
                has, or a worker leaves that is no member.
        """
        what = next(iter(entry), "")
        reason = entry.get("reason", "")
        if entry.keys() == {"join"}:
            self._join(Member.from_record(entry["join"]))
        elif (
            what in ("leave", "evict")
            and entry.keys() <= {what, "reason"}
            and type(entry[what]) is int
            and entry[what] in self.members
            and isinstance(reason, str)
        ):
            self._remove(entry[what], reason[:MAX_REASON], evicted=what == "evict")
        else:
            raise RosterError(f"it is neither a join nor the leave of a member: {str(entry)[:200]!r}")

    def _can_have(self, info: WorkerInfo) -> bool:
        """Returns whether a worker of this name and these ids can be a member at some time."""
        is_first = info.wire_id == info.id
        if not self.size:
            return is_first
        has_place = info.id < self.size and info.name == self._names[info.id]
        return has_place and (is_first or info.wire_id >= self.size)

    def _add(self, member: Member) -> None:
        """Adds a member of a snapshot."""
        info = member.info
        if not self._can_have(info) or info.wire_id in self.members or self.find(info.name) is not None:
            raise RosterError(f"{info} cannot be a member beside the others")
        self.members[info.wire_id] = self._by_name[info.name] = member

    def _join(self, member: Member) -> None:
        info = member.info
        if info.wire_id in self.members or info.wire_id in self._retired:
            raise RosterError(f"the id of {info} belongs to another worker")
        if not self._can_have(info):
            raise RosterError(f"{info} is no new incarnation of a member" if self.size else f"{info} has two ids")
        former = self.find(info.name)
        if not self.size and former is not None:
            raise RosterError(f"the name of {info} belongs to another worker")
        if self.size:
            if former is not None:
                self._remove(former.info.wire_id, "")
            for wire_id, each in self.departed.items():
                if each.member.info.id == info.id and each.successor == -1:
                    self.departed[wire_id] = Departed(each.member, each.reason, each.evicted, info.wire_id)
        self.members[info.wire_id] = self._by_name[info.name] = member

    def _remove(self, wire_id: int, reason: str, *, evicted: bool = False) -> None:
        member = self.members.pop(wire_id)
        del self._by_name[member.info.name]
        self.departed[wire_id] = Departed(member, reason, evicted)
        self._retired.add(wire_id)
        if len(self.departed) > MAX_DEPARTED:
            del self.departed[next(iter(self.departed))]
        if not self.members and not self.size:
            self.epoch += 1
            self.departed.clear()
            self._retired.clear()

    def to_record(self) -> dict[str, Any]:
        """Returns what follows from the entries so far, for `restore`.

        Of a dynamic group, it does not say how the membership of others has ended: a worker that joins has never
        known them.
        """
        departed = self.departed.values() if self.size else ()
        return {
            "epoch": self.epoch,
            "members": [asdict(member) for member in self.members.values()],
            "retired": _ranges(self._retired),
            "departed": [asdict(each) for each in departed],
        }

    def restore(self, record: Mapping[str, Any], length: int) -> None:
        """Takes over the `to_record` of another worker after `length` entries; this roster is as it began.

        Raises:
            ValueError, TypeError, LookupError: it is malformed.
            RosterError: it contradicts itself, or what the group began with.
        """
        epoch, retired = record["epoch"], _from_ranges(record["retired"], min(length, MAX_RETIRED))
        if type(epoch) is not int or not 0 <= epoch <= length:
            raise RosterError(f"its epoch is {str(epoch)[:MAX_REASON]}")
        restored = Roster()
        restored.size, restored._names = self.size, self._names
        for each in record["members"]:
            restored._add(Member.from_record(each))
        for each in record["departed"][-MAX_DEPARTED:]:
            end = Departed.from_record(each)
            if not restored._can_have(end.member.info):
                raise RosterError(f"{end.member.info} was no member")
            restored.departed[end.member.info.wire_id] = end
        if not restored.departed.keys() <= retired or restored.members.keys() & retired:
            raise RosterError("its members and former members contradict each other")
        self.members, self._by_name = restored.members, restored._by_name
        self.departed, self._retired, self.epoch = restored.departed, retired, epoch

    def find(self, name: str) -> Member | None:
        """Returns the member of this name; None without one."""
        return self._by_name.get(name)

    def choose(self, name: str, rank: int) -> WorkerInfo:
        """Returns the identity with which a worker can join. Rank -1 is the lowest free one, in a dynamic group.

        Raises RendezvousError if another worker has the name or the rank, or nobody can have the rank.
        """
        used = self.members.keys() | self._retired
        if self.size:
            if not 0 <= rank < self.size or self._names[rank] != name:
                raise RendezvousError(f"the group that has formed has no worker {name!r} with rank {rank}")
            return WorkerInfo(name, rank, max([self.size - 1, *used]) + 1)
        holder = self.find(name)
        if holder is not None:
            raise RendezvousError(
                f"worker name {name!r} is not unique: the member with id {holder.info.id} at "
                f"{holder.address} has it; give each worker a name of its own"
            )
        if rank > MAX_ID:
            raise RendezvousError(f"rank {rank} is too large: the largest is {MAX_ID}")
        if rank in used:
            raise RendezvousError(
                f"rank {rank} is taken: in a dynamic group no two workers have the same rank, even one after "
                f"the other; leave rank out, or take {max(used) + 1}"
            )
        return WorkerInfo(name, rank if rank != -1 else next(i for i in range(len(used) + 1) if i not in used))


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Returns numbers as ranges, each by its first and last number."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    return [[run[0][1], run[-1][1]] for run in (list(pairs) for _, pairs in runs)]


def _from_ranges(ranges: Sequence[Sequence[int]], most: int) -> set[int]:
    """Returns the numbers in ranges. Raises ValueError or TypeError if they are none, or more than `most`."""
    found: set[int] = set()
    for first, last in ranges:
        if not (type(first) is type(last) is int and 0 <= first <= last <= MAX_ID):
            raise ValueError(f"it has a range from {first!r:.20} to {last!r:.20}")
        if len(found) + last - first >= most:  # before there is memory for them
            raise ValueError(f"more than {most} workers have left")
        found.update(range(first, last + 1))
    return found
