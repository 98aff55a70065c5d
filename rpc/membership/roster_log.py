"""The log of joins and leaves of a group, in the group's store.

Entry n is the n-th change. A worker appends an entry by compare-and-set at the end of the log, knowing all entries
before it. So every entry is valid at its position, and all workers that know the same number of entries agree on
the members.

Who appends an entry also writes a snapshot of the members now and then. A worker that joins reads it, and the
entries after it, so joining costs what the present members cost, however many there have been. The entries stay in
the store: a position that has been taken is never free again, and a member that was stopped for long reads on.
Workers keep no entries, and of the past only a few digests and the ids that must not be used again.

A worker that joins informs the current members itself: its hello to each of them says how many entries it knows,
with a digest of them. Members then read what is new to them in the store. They do not poll it, and go on when it
is gone.
"""

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

from ...c10d.torch_types import TorchStore
from ..contracts.worker import Member, RosterVersion, WorkerInfo
from ..execution.interruptions import start_thread
from .roster import MAX_REASON, Departed, Roster, RosterError

__all__ = ["RosterLog"]

LEAVE_TIMEOUT_S = 2.0
"""Seconds that a worker which leaves waits for the store. Without it, others find out later that it is gone."""

MAX_ENTRY_CHARACTERS = 1 << 20
"""Characters of the longest entry; the device maps of a worker, to each other one, are in it."""

MAX_SNAPSHOT_CHARACTERS = 64 << 20

MIN_SNAPSHOT_ENTRIES = 16
"""Entries between two snapshots at least; where there are more members, about as many as these."""

MAX_READ = 256
"""Entries that are read at a time."""

MAX_DIGESTS = 256
"""Versions that are remembered: the last ones. Who had joined before them, and is unknown here, has left."""

log = logging.getLogger(__name__)


@final
class RosterLog:
    """One worker's copy of the log and the members that follow from it. Safe to use from any thread."""

    def __init__(self, store: TorchStore, group: str = "") -> None:
        """Knows no entry of the log in a store yet. `group` names a static group; a dynamic one has no name."""
        self.dynamic = not group
        """Whether it is the log of a dynamic group."""
        self._store = store
        self._prefix = f"rpc/static/{group}" if group else "rpc/dynamic"
        self._lock = threading.Lock()
        self.version = RosterVersion()
        """Of the locally known prefix of the log."""
        self._digests = deque([self.version.digest], MAX_DIGESTS)
        """Those of the last versions, up to the present one."""
        self._roster = Roster()

    def begin(self, first: Sequence[Member]) -> None:
        """Sets the members that have formed a static group, which the log begins with."""
        with self._lock:
            self._roster = Roster(first)

    @property
    def epoch(self) -> int:
        """The epoch in this copy of the log: the number of times that the last member has left."""
        return self._roster.epoch

    def members(self) -> list[Member]:
        """Returns the members after the locally known prefix of the log."""
        with self._lock:
            return list(self._roster.members.values())

    def departed(self) -> dict[int, Departed]:
        """Returns those that have left last, after the locally known prefix of the log, by wire id."""
        with self._lock:
            return dict(self._roster.departed)

    def find(self, name: str) -> Member | None:
        """Returns the member of this name after the locally known prefix of the log; None without one."""
        with self._lock:
            return self._roster.find(name)

    def catch_up(self) -> None:
        """Reads the store to the end of the log. Raises what the store raises, or RosterError."""
        if not self.version.length:
            self._load_snapshot()
        while self._read(MAX_READ) == MAX_READ:
            pass

    def learn(self, version: RosterVersion) -> None:
        """Reads the entries that another worker says it knows, and that are new here. Waits for the store.

        Raises RosterError if it has other entries than the store, or the store cannot be asked.
        """
        while (position := self.version.length) < version.length:
            try:
                count = self._read(min(MAX_READ, version.length - position))
            except RosterError:
                raise
            except Exception as error:
                raise RosterError(f"the store cannot tell entry {position} of its roster: {error}") from None
            if not count:
                raise RosterError(f"entry {position} of its roster is not in the store")
        with self._lock:
            age = self.version.length - version.length
            known = self._digests[-1 - age] if age < len(self._digests) else None
        if known is None:
            raise RosterError(f"its roster is {age} entries older than what is known here")
        if known != version.digest:
            raise RosterError("its roster contradicts what is known here")

    def _read(self, most: int) -> int:
        """Takes in the next entries in the store, `most` at most; returns their number."""
        position = self.version.length
        keys = [self._key(position + number) for number in range(self._count(position, most))]
        store: Any = self._store
        if len(keys) > 1 and store.has_extended_api():
            entries = store.multi_get(keys)
        else:
            entries = [store.get(key) for key in keys]
        for number, entry in enumerate(entries):
            self._add(position + number, entry.decode(errors="replace"))
        return len(keys)

    def _count(self, position: int, most: int) -> int:
        """Returns how many entries the store has from a position on, `most` at most. The log has no gap."""
        found, beyond = 0, most + 1
        while beyond - found > 1:
            probed = found + max(1, min(found, (beyond - found) // 2))
            if self._store.check([self._key(position + probed - 1)]):
                found = probed
            else:
                beyond = probed
        return found

    def _load_snapshot(self) -> None:
        """Takes over the snapshot in the store, if there is one. Raises RosterError if it is none."""
        if not self._store.check([self._snapshot_key]):
            return
        text = self._store.get(self._snapshot_key).decode(errors="replace")
        try:
            if len(text) > MAX_SNAPSHOT_CHARACTERS:
                raise RosterError(f"it has {len(text)} characters, of {MAX_SNAPSHOT_CHARACTERS} at most")
            record = json.loads(text)
            version = RosterVersion(record["length"], bytes.fromhex(record["digest"]))
            if type(version.length) is not int or version.length < 1:
                raise RosterError("it has no length")
            if not self._store.check([self._key(version.length - 1)]):
                raise RosterError(f"it is of {version.length} entries, which the log does not have")
            with self._lock:
                if self.version.length:
                    return  # another thread has read it
                self._roster.restore(record["roster"], version.length)
                self.version = version
                self._digests.clear()
                self._digests.append(version.digest)
        except (RosterError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise RosterError(f"the snapshot of the roster is refused: {str(error)[:MAX_REASON]}") from None

    def _write_snapshot(self) -> None:
        """Writes what is known here to the store, for workers that join. Another one may just do so, too."""
        with self._lock:
            version, roster = self.version, self._roster.to_record()
        snapshot = {"length": version.length, "digest": version.digest.hex(), "roster": roster}
        with contextlib.suppress(Exception):  # of the store: who joins reads more entries then
            self._store.set(self._snapshot_key, json.dumps(snapshot))

    def _add(self, position: int, text: str) -> None:
        """Appends an entry of the store, unless it is known. Raises RosterError if it is none."""
        with self._lock:
            if position != self.version.length:
                return  # another thread has read it
            try:
                if len(text) > MAX_ENTRY_CHARACTERS:
                    raise RosterError(f"it has {len(text)} characters, of {MAX_ENTRY_CHARACTERS} at most")
                entry = json.loads(text)
                self._roster.apply(entry if isinstance(entry, dict) else {})
            except (RosterError, ValueError, RecursionError) as error:
                raise RosterError(f"entry {position} of the roster is refused: {error}") from None
            self.version = self.version.followed_by(text)
            self._digests.append(self.version.digest)

    def choose(self, name: str, rank: int) -> WorkerInfo:
        """Returns the identity with which a worker can join: see `Roster.choose`."""
        with self._lock:
            return self._roster.choose(name, rank)

    def join(self, member: Member) -> bool:
        """Appends a join to the log. Returns False, and learns of the entry, if another worker was faster.

        Raises RosterError if the others would refuse it.
        """
        record = asdict(member)
        try:
            Member.from_record(record)
        except ValueError as error:
            raise RosterError(f"worker {member.info.name!r} cannot join: {error}") from None
        return self._append({"join": record})

    def leave(self, identifier: int, reason: str = "") -> None:
        """Appends a leave to the log, unless the member has left already. Raises what the store raises."""
        while identifier in self._roster.members:
            self._append({"leave": identifier, **({"reason": reason} if reason else {})})

    def has(self, identifier: int) -> bool:
        """Returns whether this incarnation is a member after the locally known prefix of the log."""
        return identifier in self._roster.members

    def evict(self, identifier: int, reason: str, by: int | None) -> bool:
        """Appends an eviction to the log, unless one of the two workers is no member; returns whether it has.

        So of two workers that want to evict each other, the faster one stays. `by` is the id of this worker; None
        if it is about to join. Raises what the store raises.
        """
        has_evicted = False
        concerned = {identifier} if by is None else {identifier, by}
        while concerned <= self._roster.members.keys():
            has_evicted = self._append({"evict": identifier, "reason": reason})
        return has_evicted

    def try_to_leave(self, identifier: int) -> None:
        """Appends a leave as `leave` does, unless the store has gone or does not answer within LEAVE_TIMEOUT_S."""
        thread = threading.Thread(
            target=self._leave_if_possible, args=(identifier,), name="gradwire-leave", daemon=True
        )
        if not start_thread(thread):
            self._leave_if_possible(identifier)
            return
        thread.join(LEAVE_TIMEOUT_S)
        if thread.is_alive():  # it ends when the store answers, gives up or is closed
            log.warning("the store does not answer, so this worker leaves without its entry in the roster")

    def _leave_if_possible(self, identifier: int) -> None:
        with contextlib.suppress(Exception):  # of the store
            self.leave(identifier)

    def _append(self, entry: Mapping[str, Any]) -> bool:
        text = json.dumps(entry)
        if len(text) > MAX_ENTRY_CHARACTERS:  # all workers would refuse it, and all that follow it
            raise RosterError(
                f"what the others have to know has {len(text)} characters, of {MAX_ENTRY_CHARACTERS} at most: "
                "give fewer device maps"
            )
        position = self.version.length
        stored = self._store.compare_set(self._key(position), "", text).decode(errors="replace")
        self._add(position, stored)
        if stored != text:
            return False
        if (position + 1) % self._snapshot_interval() == 0:
            self._write_snapshot()
        return True

    def _snapshot_interval(self) -> int:
        """Returns the number of entries from one snapshot to the next: a power of two, with so many members."""
        return 1 << (max(MIN_SNAPSHOT_ENTRIES, len(self._roster.members)) - 1).bit_length()

    def _key(self, position: int) -> str:
        return f"{self._prefix}/{position}"

    @property
    def _snapshot_key(self) -> str:
        return f"{self._prefix}/snapshot"
