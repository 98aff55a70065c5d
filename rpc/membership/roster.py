"""The members of a dynamic group, whose workers join and leave at any time.

They are kept as a log in the group's store: entry n says who joined or left as the n-th. A worker adds an entry
by compare-and-set at the end of the log, knowing all entries before it, so every entry is valid where it
stands, and all workers that know as many entries agree on the members.

Who joins tells the members of the moment itself: its hello to each of them carries the log. So a member that
has been in the group for long never reads the store again, and goes on when the store is gone.
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
    """The members after some number of entries."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        """By id."""
        self.used_ids: set[int] = set()
        self.epoch = 0
        """How often all members had left. Ids and names are free again then: it is another group."""

    def apply(self, entry: Mapping[str, Any]) -> None:
        """One more entry."""
        if (joined := entry.get("join")) is not None:
            member = Member.from_record(joined)
            self.members[member.info.id] = member
            self.used_ids.add(member.info.id)
            return
        self.members.pop(entry["leave"], None)
        if not self.members:
            self.epoch += 1
            self.used_ids.clear()

    def named(self, name: str) -> Member | None:
        """The member of this name."""
        return next((member for member in self.members.values() if member.info.name == name), None)


@final
class RosterLog:
    """One worker's copy of the log. Safe to use from any thread."""

    def __init__(self, store: TorchStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._entries: list[str] = []
        self._roster = Roster()

    @property
    def epoch(self) -> int:
        """See Roster."""
        return self._roster.epoch

    def entries(self) -> Sequence[str]:
        """What is known of the log."""
        with self._lock:
            return tuple(self._entries)

    def members(self) -> list[Member]:
        """The members as far as is known."""
        with self._lock:
            return list(self._roster.members.values())

    def named(self, name: str) -> Member | None:
        """The member of this name, as far as is known."""
        with self._lock:
            return self._roster.named(name)

    def catch_up(self) -> None:
        """Reads the store to the end of the log. Raises what the store raises."""
        while self._store.check([key := self._key(len(self._entries))]):
            self.learn([*self.entries(), self._store.get(key).decode()])

    def learn(self, entries: Sequence[str]) -> None:
        """Takes over the entries that another worker knows."""
        with self._lock:
            for text in entries[len(self._entries) :]:
                self._roster.apply(json.loads(text))
                self._entries.append(text)

    def choose(self, name: str, rank: int) -> WorkerInfo:
        """Who a worker can be that wants this name and rank (-1 for any).

        Raises:
            RendezvousError: a member has the name, or some worker has had the rank.
        """
        with self._lock:
            holder = self._roster.named(name)
            if holder is not None:
                raise RendezvousError(
                    f"worker name {name!r} is not unique: the member with id {holder.info.id} at "
                    f"{holder.address} has it; give each worker a name of its own"
                )
            used = self._roster.used_ids
            if rank in used:
                raise RendezvousError(
                    f"rank {rank} is taken: no two workers of a dynamic group have the same, not even one after "
                    f"the other; leave rank out, or take {max(used) + 1}"
                )
            return WorkerInfo(name, rank if rank != -1 else next(i for i in range(len(used) + 1) if i not in used))

    def join(self, member: Member) -> bool:
        """Adds a member at the end of the log; False if somebody else was faster."""
        return self._append({"join": asdict(member)})

    def leave(self, identifier: int) -> None:
        """Has a member leave, unless it has left already. Raises what the store raises."""
        while identifier in self._roster.members:
            self._append({"leave": identifier})

    def _append(self, entry: Mapping[str, Any]) -> bool:
        text = json.dumps(entry)
        position = len(self._entries)
        stands = self._store.compare_set(self._key(position), "", text).decode()
        self.learn([*self.entries()[:position], stands])
        return stands == text

    def _key(self, position: int) -> str:
        return f"rpc/dynamic/{position}"
