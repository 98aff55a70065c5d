"""The log of joins and leaves of a group, in the group's store, and the members that follow from it.

Entry n is the n-th change. A worker appends an entry by compare-and-set at the end of the log, knowing all entries
before it. So every entry is valid at its position, and all workers that know the same number of entries agree on
the members.

Who appends an entry also writes a snapshot of the members now and then. A worker that joins reads it, and the
entries after it, so joining costs what the present members cost, however many there have been. The entries stay in
the store: a position that has been taken is never free again, and a member that was stopped for long reads on.
Workers keep no entries, and of the past only a few digests and the ids that must not be used again.

A worker that joins informs the current members itself: its hello to each of them says how many entries it knows,
with a digest of them. It is not trusted: members then read what is new to them in the store, and compare. They do
not poll it, and go on when it is gone.
"""

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, final

from ...c10d.torch_types import TorchStore
from ...errors import LossCause, RendezvousError
from ..contracts.worker import MAX_ID, SHUT_DOWN, Member, RosterVersion, WorkerEnd, WorkerInfo
from ..execution.executor import Executor, SerialCalls
from ..execution.interruptions import start_thread
from ..peers.peer import Peers
from ..transports.grpc_endpoint import RefusedError

__all__ = ["Departed", "Roster", "RosterError", "RosterFollower", "RosterLog"]

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

MAX_REASON = 500
"""Characters of the reason of a leave or an eviction that are kept."""

MAX_RETIRED = 1 << 22
"""Members that a snapshot may say have left in an epoch. A worker that joins keeps the id of each, in some 300 MB
then; the store would have two entries of the log for each, which are several times as large."""

MAX_DEPARTED = 256
"""Incarnations of which it is known how their membership has ended: the last ones. Of others, the ids are kept."""

log = logging.getLogger(__name__)


class RosterError(RendezvousError):
    """An entry of the log is malformed, contradicts those before it, or is not in the store."""


@final
@dataclass(frozen=True, slots=True)
class Departed:
    """An incarnation of a worker that is a member no longer.

    member: the incarnation.
    reason: why others have removed it; empty if it has left by itself, or was started again.
    evicted: whether the others have removed it because it did not answer.
    successor: the wire id of the incarnation that has taken its place at its departure, or later; -1 without one.
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


@final
class RosterFollower:
    """Compares the log with what is known here. Used on the event loop, but for `begin`."""

    def __init__(
        self,
        roster: RosterLog,
        peers: Peers,
        add: Callable[[Member], None],
        let_in: Callable[[], None],
        executor: Executor,
    ) -> None:
        """Changes nothing yet. The threads of the executor wait for the store, for `learn` one at a time.

        `add` adds a member that is unknown here. `let_in` has this worker say in its hellos how far it knows the
        log, and accept the members.
        """
        self.roster = roster
        self._peers = peers
        self._add, self._let_in = add, let_in
        self._reads = SerialCalls(executor)
        self._is_closed = False

    def begin(self, members: Sequence[Member]) -> None:
        """Adds the first members, and the former ones; nobody is let in yet."""
        self._add_departed(self.roster.departed().values())
        for member in sorted(members, key=lambda member: member.info.wire_id):
            self._add(member)

    async def learn(self, version: RosterVersion) -> None:
        """Learns what the sender of a hello knows. Raises RefusedError if the store does not say the same."""
        try:
            await self._reads.run(partial(self.roster.learn, version))
        except RosterError as error:
            raise RefusedError(f"worker {self._peers.me.name!r} refuses a roster: {error}") from None
        self.follow()

    def follow(self) -> None:
        """Takes in all changes that are unknown here: other threads may have read some of them."""
        if self._is_closed:
            return
        departed, known = self.roster.departed(), self._peers.by_id
        joined = [member for member in self.roster.members() if member.info.wire_id not in known]
        self._add_departed(departed.values())
        for member in joined:
            self._add(member)
        self._let_in()
        for wire_id, each in departed.items():
            if wire_id in known and wire_id != self._peers.me.wire_id:
                peer = known[wire_id]
                if each.was_removed:
                    peer.on_closed(WorkerEnd(LossCause.DISCONNECTED, each.why))
                elif not peer.is_connected:  # else it says goodbye itself
                    peer.on_closed(SHUT_DOWN)
        if (me := departed.get(self._peers.me.wire_id)) is not None and me.was_removed:
            for peer in self._peers.all():
                peer.evicted(self._peers.me.name, me.reason or me.why)
        for member in joined:
            if (link := self._peers.of(member.info).link) is not None:
                link.tell_joined()

    def close(self) -> None:
        """Takes in nothing any more. Called on any thread."""
        self._is_closed = True

    def _add_departed(self, departed: Iterable[Departed]) -> None:
        """Adds former members of a static group that are unknown here, because there may be references to them."""
        for each in () if self.roster.dynamic else departed:
            if each.member.info.wire_id not in self._peers.by_id:
                self._add(each.member)
                self._peers.of(each.member.info).mark_lost(WorkerEnd(LossCause.DISCONNECTED, each.why))
