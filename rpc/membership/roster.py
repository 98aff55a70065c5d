"""The members of a dynamic group, whose workers join and leave at any time.

They are kept as a log in the group's store: entry n is the n-th join or leave. A worker appends an entry by
compare-and-set at the end of the log, knowing all entries before it. So every entry is valid at its position,
and all workers that know the same number of entries agree on the members.

A worker that joins informs the current members itself: its hello to each of them carries the log. Members do not
poll the store, and go on when it is gone. But anybody may send a hello, so a member asks the store whether it has
the entries that are new to it.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from ...c10d.torch_types import TorchStore
from ...errors import RendezvousError
from ..contracts.worker import WorkerInfo
from .members import Member

__all__ = ["Roster", "RosterError", "RosterLog"]

LEAVE_TIMEOUT_S = 2.0
"""Seconds that a worker which leaves waits for the store. Without it, others find out later that it is gone."""

MAX_ENTRY_CHARACTERS = 64 << 10
"""Characters of the longest entry; the device maps of a worker are in it."""

log = logging.getLogger(__name__)


class RosterError(RendezvousError):
    """An entry of the log is malformed, contradicts those before it, or is not in the store."""


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
        """Applies the next entry of the log.

        Raises:
            ValueError: it describes no member.
            RosterError: it is malformed, or no worker could append it: a member joins whose id or name another one
                has, or a worker leaves that is no member.
        """
        if entry.keys() == {"join"}:
            self._join(Member.from_record(entry["join"]))
        elif entry.keys() == {"leave"} and type(entry["leave"]) is int and entry["leave"] in self.members:
            del self.members[entry["leave"]]
            if not self.members:
                self.epoch += 1
                self.used_ids.clear()
        else:
            raise RosterError(f"it is neither a join nor the leave of a member: {str(entry)[:200]!r}")

    def _join(self, member: Member) -> None:
        if member.info.wire_id in self.used_ids or self.find(member.info.name) is not None:
            raise RosterError(f"the id or name of {member.info} belongs to another worker")
        self.members[member.info.wire_id] = member
        self.used_ids.add(member.info.wire_id)

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
        """Reads the store to the end of the log.

        Raises:
            RosterError: an entry in the store is none.
            Exception: what the store raises.
        """
        while (text := self._read(position := len(self._entries))) is not None:
            self._add(position, text)

    def learn(self, entries: Sequence[str]) -> None:
        """Appends the entries that are not known here yet, if the store has them. Waits for the store.

        Args:
            entries: a prefix of the log, as a worker says that has not been admitted.

        Raises:
            RosterError: they are not a prefix of the log, or the store cannot be asked.
        """
        known = self.entries()
        if tuple(entries[: len(known)]) != known[: len(entries)]:
            raise RosterError("its roster contradicts what is known here")
        for position in range(len(known), len(entries)):
            try:
                stored = self._read(position)
            except Exception as error:
                raise RosterError(f"the store cannot tell entry {position} of its roster: {error}") from None
            if stored != entries[position]:
                raise RosterError(f"entry {position} of its roster is not in the store")
            self._add(position, stored)

    def _read(self, position: int) -> str | None:
        """Returns an entry in the store; None if there is none yet."""
        key = self._key(position)
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else None

    def _add(self, position: int, text: str) -> None:
        """Appends an entry of the store, unless it is known. Raises RosterError if it is none."""
        with self._lock:
            if position != len(self._entries):
                return  # another thread has read it
            try:
                if len(text) > MAX_ENTRY_CHARACTERS:
                    raise RosterError(f"it has {len(text)} characters, of {MAX_ENTRY_CHARACTERS} at most")
                entry = json.loads(text)
                self._roster.apply(entry if isinstance(entry, dict) else {})
            except (RosterError, ValueError, RecursionError) as error:
                raise RosterError(f"entry {position} of the roster is refused: {error}") from None
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

    def try_to_leave(self, identifier: int) -> None:
        """Appends a leave as `leave` does, unless the store has gone or does not answer within LEAVE_TIMEOUT_S."""
        thread = threading.Thread(
            target=self._leave_if_possible, args=(identifier,), name="gradwire-leave", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter exits
            self._leave_if_possible(identifier)
        else:
            thread.join(LEAVE_TIMEOUT_S)
            if thread.is_alive():  # it ends when the store answers, gives up or is closed
                log.warning("the store does not answer, so this worker leaves without its entry in the roster")

    def _leave_if_possible(self, identifier: int) -> None:
        with contextlib.suppress(Exception):  # of the store
            self.leave(identifier)

    def _append(self, entry: Mapping[str, Any]) -> bool:
        text = json.dumps(entry)
        position = len(self._entries)
        stored = self._store.compare_set(self._key(position), "", text).decode(errors="replace")
        self._add(position, stored)
        return stored == text

    def _key(self, position: int) -> str:
        return f"rpc/dynamic/{position}"
