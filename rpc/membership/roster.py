"""The members of a dynamic group, whose workers join and leave at any time.

They are kept as a log in the group's store: entry n is the n-th join or leave. A worker appends an entry by
compare-and-set at the end of the log, knowing all entries before it. So every entry is valid at its position,
and all workers that know the same number of entries agree on the members.

A worker that joins informs the current members itself: its hello to each of them carries the log. So members need
not read the store again, and go on when it is gone.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from ...c10d.torch_types import TorchStore
from ...errors import RendezvousError
from ..contracts.worker import WorkerInfo
from .members import Member

__all__ = ["Roster", "RosterLog"]


@final
class Roster:
    """The members after some number of entries of the log."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        """The current members by id."""
        self.used_ids: set[int] = set()
        """The ids of all members, current and former, of this epoch."""
        self.epoch = 0
        """The number of times that the last member has left. Each epoch is a new group with all ids free."""

    def apply(self, entry: Mapping[str, Any]) -> None:
        """Applies the next entry of the log."""
        if (joined := entry.get("join")) is not None:
            member = Member.from_record(joined)
            self.members[member.info.id] = member
            self.used_ids.add(member.info.id)
            return
        self.members.pop(entry["leave"], None)
        if not self.members:
            self.epoch += 1
            self.used_ids.clear()

    def find(self, name: str) -> Member | None:
        """Returns the member of this name; None without one."""
        return next((member for member in self.members.values() if member.info.name == name), None)


@final
class RosterLog:
    """One worker's copy of the log and the members that follow from it. Safe to use from any thread."""

    def __init__(self, store: TorchStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._entries: list[str] = []
        self._roster = Roster()

    @property
    def epoch(self) -> int:
        """The epoch in this copy of the log: the number of times that the last member has left."""
        return self._roster.epoch

    def entries(self) -> Sequence[str]:
        """Returns the locally known prefix of the log, as JSON texts."""
        with self._lock:
            return tuple(self._entries)

    def members(self) -> list[Member]:
        """Returns the members after the locally known prefix of the log."""
        with self._lock:
            return list(self._roster.members.values())

    def find(self, name: str) -> Member | None:
        """Returns the member of this name after the locally known prefix of the log; None without one."""
        with self._lock:
            return self._roster.find(name)

    def catch_up(self) -> None:
        """Reads the store to the end of the log. Raises what the store raises."""
        while self._store.check([key := self._key(len(self._entries))]):
            self.extend([*self.entries(), self._store.get(key).decode()])

    def extend(self, entries: Sequence[str]) -> None:
        """Appends the entries that are not known here yet. Args: entries: a prefix of the log, from any worker."""
        with self._lock:
            for text in entries[len(self._entries) :]:
                self._roster.apply(json.loads(text))
                self._entries.append(text)

    def choose(self, name: str, rank: int) -> WorkerInfo:
        """Returns the name and id with which a worker can join.

        Args:
            name: the name that it wants.
            rank: the id that it wants; -1 for the lowest free one.

        Raises:
            RendezvousError: a member has the name, or a current or former member has the rank.
        """
        with self._lock:
            holder = self._roster.find(name)
            if holder is not None:
                raise RendezvousError(
                    f"worker name {name!r} is not unique: the member with id {holder.info.id} at "
                    f"{holder.address} has it; give each worker a name of its own"
                )
            used = self._roster.used_ids
            if rank in used:
                raise RendezvousError(
                    f"rank {rank} is taken: in a dynamic group no two workers have the same rank, even one after "
                    f"the other; leave rank out, or take {max(used) + 1}"
                )
            return WorkerInfo(name, rank if rank != -1 else next(i for i in range(len(used) + 1) if i not in used))

    def join(self, member: Member) -> bool:
        """Appends a join to the log. Returns False, and learns of the entry, if another worker was faster."""
        return self._append({"join": asdict(member)})

    def leave(self, identifier: int) -> None:
        """Appends a leave to the log, unless the member has left already. Raises what the store raises."""
        while identifier in self._roster.members:
            self._append({"leave": identifier})

    def _append(self, entry: Mapping[str, Any]) -> bool:
        text = json.dumps(entry)
        position = len(self._entries)
        stored = self._store.compare_set(self._key(position), "", text).decode()
        self.extend([*self.entries()[:position], stored])
        return stored == text

    def _key(self, position: int) -> str:
        return f"rpc/dynamic/{position}"
