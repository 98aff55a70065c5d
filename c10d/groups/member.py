"""One process as a member of a group whose ranks change: leaves its ranks, agrees on others, and forms the group.

A group keeps its ProcessGroup object, so that torch, DDP and others find the new ranks in it; each set of ranks
has a GroupCore of its own. The steps, which all members of the new group take together:

1. The old core ends: what is still in flight raises an error, and threads, sockets and memory are released.
2. The members agree on who is in the new group (ReconfigureRound), unless the caller says who is.
3. They wait for each other at a StartBarrier: all raise the same error if one does not come.
4. The new core connects, with a failure detector and engines of its own.

After an error in 2, 3 or 4 the group has no ranks until a later attempt succeeds.

Members name each other by handles, texts that torch calls reconfigure handles. A member's id stays the same as
long as its group object lives; the ranks in a handle are those of its last group.

Rounds of agreement are numbered, and one is open at a time. Whoever calls adds its arrival to the open round, and
waits. One member ends the round, by a compare-and-set of the list of members, so all read the same list. A member
that is not on it (it came too late) goes on to the next round. A member whose time is up, or that is interrupted,
withdraws its arrival. One that is killed may leave an index without an arrival.
"""

import hashlib
import json
import threading
import time
import uuid as uuids
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Self, final

import torch.distributed as dist

from ...errors import GradwireError, ProcessGroupError, UnsupportedOperationError
from ...net.exchanged_values import parse_dict, unexpected_value
from ..rendezvous.start_barrier import Registration, StartBarrier
from ..stores.views import PrefixStore, describe_store, wait_for_keys
from ..torch_types import TorchStore
from .core import GroupCore

__all__ = ["Arrival", "GroupHandle", "GroupMember", "ReconfigureRound"]

MAX_HANDLE_CHARACTERS = 256

MAX_WAIT_S = 1.0
"""Seconds after which a member that waits for arrivals looks whether another member has ended the round."""

MIN_WAIT_S = 0.001
"""torch's stores take a shorter timeout for none at all."""

MAX_ARRIVALS = 65536
"""Arrivals of one round that are read."""

_NONE: Final = "none"

FormCore = Callable[[PrefixStore, int, tuple[int, ...], timedelta, float], GroupCore]
"""Makes a core and connects it, as all ranks do together. Takes the core's store, this process's rank, the global
ranks, the default timeout of operations, and the seconds that are left to connect."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandle:
    """One member of a group that is to be formed.

    member: a random id.
    rank: its rank in the last group; -1 if it has been in none.
    global_rank: its rank in its process's default group; -1 if this is the default group, or there is none.
    """

    member: str
    rank: int
    global_rank: int

    def to_text(self) -> str:
        """Returns the handle as other processes get it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads the result of `to_text`; raises ValueError for anything else."""
        try:
            if not isinstance(text, str) or len(text) > MAX_HANDLE_CHARACTERS:
                raise ValueError("too long, or no text")
            return cls(**parse_dict(text, {"member": str, "rank": int, "global_rank": int}))
        except ValueError:
            raise ValueError(
                f"{str(text)[:80]!r} is no handle of a gradwire group: give what get_reconfigure_handle() returned"
            ) from None


def _parse_handles(texts: Collection[str]) -> list[GroupHandle]:
    """Returns the members of a new group in the order of their ranks there.

    A list assigns ranks by position. In a set, members keep the order of their last ranks, and those without one
    come after them. Raises ValueError for no members, for one that is there twice, and for what is no handle.
    """
    if isinstance(texts, str) or not texts:
        raise ValueError(f"the handles are {texts!r}: give a list or set of the handles of all members")
    handles = [GroupHandle.from_text(text) for text in texts]
    if isinstance(texts, set | frozenset):
        handles.sort(key=lambda each: (each.rank < 0, each.rank, each.member))
    if len({each.member for each in handles}) < len(handles):
        raise ValueError("the handles name one member twice: give each member's once")
    return handles


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a member says when it arrives in a round.

    handle: who it is.
    generation: which group it was in before; empty if none. The same text on all members of that group.
    size: the number of ranks of that group.
    gone: the ranks of that group whose processes have died, as far as the member knows.
    """

    handle: GroupHandle
    generation: str = ""
    size: int = 0
    gone: Sequence[int] = ()

    def to_text(self) -> str:
        """Returns the value for the store."""
        values = {"handle": self.handle.to_text(), "generation": self.generation, "size": self.size}
        return json.dumps({**values, "gone": sorted(self.gone)})

    @classmethod
    def from_text(cls, text: bytes) -> Self:
        """Reads the result of `to_text`; raises ProcessGroupError for anything else."""
        try:
            found = parse_dict(text, {"handle": str, "generation": str, "size": int, "gone": list})
            handle = GroupHandle.from_text(found["handle"])
            if any(type(rank) is not int for rank in found["gone"]):
                raise ValueError("a rank is no number")
        except ValueError:
            raise ProcessGroupError(unexpected_value(text, "the arrival of a member")) from None
        return cls(handle=handle, generation=found["generation"], size=found["size"], gone=tuple(found["gone"]))


@final
class GroupMember:
    """One process's membership in one group. Owned by a ProcessGroup.

    store: of the group, whatever its ranks.
    core: that of the present ranks.
    generation: what the present ranks are called in the store; empty if there are none yet.
    cannot_reconfigure: why the group cannot be formed anew; empty if it can.
    """

    def __init__(
        self,
        store: TorchStore,
        core: GroupCore,
        form: FormCore,
        *,
        generation: str,
        cannot_reconfigure: str,
    ) -> None:
        self.store: Final = store
        self.core = core
        self.generation = generation
        self.cannot_reconfigure: Final = cannot_reconfigure
        self._form = form
        self._id = uuids.uuid4().hex
        self._used_uuids: set[int] = set()
        self._lock = threading.Lock()  # held while the group is formed anew

    def handle(self, *, is_default_group: bool) -> GroupHandle:
        """Returns the handle by which other members name this one."""
        in_default_group = not is_default_group and dist.is_initialized()
        return GroupHandle(
            member=self._id,
            rank=self.core.rank,
            global_rank=dist.get_rank() if in_default_group else -1,
        )

    def agree(
        self, handle: GroupHandle, *, min_size: int, max_size: int | None, window_s: float, timeout_s: float
    ) -> tuple[int, list[str]]:
        """Leaves the old ranks, and agrees on the new ones; see gradwire.c10d.rendezvous_reconfigure."""
        self._require_support()
        with self._lock:
            core = self.core
            core.leave_to_reconfigure()
            arrival = Arrival(
                handle=handle,
                generation=self.generation,
                size=max(core.size, 0),
                gone=tuple(core.lost_ranks),
            )
            rounds = ReconfigureRound(
                PrefixStore("reconfigure", self.store),
                arrival,
                min_size=min_size,
                max_size=max_size,
                window_s=window_s,
            )
            try:
                return rounds.run(timeout_s)
            except ProcessGroupError:
                raise
            except (GradwireError, RuntimeError) as error:
                raise _not_formed(core.rank, error) from error

    def reconfigure(self, key: str, texts: Collection[str], timeout_s: float) -> GroupCore:
        """Leaves the old ranks, and forms the group with these members; see gradwire.c10d.reconfigure.

        `key` is what all members call this attempt, `texts` are the handles of the members.
        """
        self._require_support()
        handles = _parse_handles(texts)
        rank = next((rank for rank, each in enumerate(handles) if each.member == self._id), None)
        if rank is None:
            raise ValueError("the handles lack that of this process: only the members of a group form it")
        deadline = time.monotonic() + timeout_s
        with self._lock:
            old = self.core
            old.leave_to_reconfigure()
            digest = hashlib.sha256(" ".join(each.member for each in handles).encode()).hexdigest()[:16]
            generation = f"{key}/{digest}"
            try:
                self._wait_for_all(generation, rank, len(handles), timeout_s)
                store = PrefixStore(f"ranks/{generation}", self.store)
                left_s = max(deadline - time.monotonic(), 0.001)
                core = self._form(store, rank, _global_ranks(handles), old.timeout, left_s)
            except UnsupportedOperationError:
                raise
            except (GradwireError, RuntimeError, OSError) as error:
                raise _not_formed(old.rank, error) from error
            core.replace(old)
            self.core = core
            self.generation = generation
            return core

    def use_uuid(self, uuid: int) -> None:
        """Marks a uuid as used. Raises ProcessGroupError if it has been used before."""
        if uuid in self._used_uuids:
            raise ProcessGroupError(f"uuid {uuid} was already used for this group: give another for each attempt")
        self._used_uuids.add(uuid)

    def _require_support(self) -> None:
        self.core.require_own_process()
        if self.cannot_reconfigure:
            raise UnsupportedOperationError(self.core.backend, "form groups anew", self.cannot_reconfigure)

    def _wait_for_all(self, generation: str, rank: int, size: int, timeout_s: float) -> None:
        store = PrefixStore(f"members/{generation}", self.store)
        try:
            barrier = StartBarrier(store, Registration(rank=rank, world_size=size))
            barrier.register()
            barrier.wait("", timeout_s)
        finally:
            with suppress(RuntimeError):
                store.close()


def _global_ranks(handles: Collection[GroupHandle]) -> tuple[int, ...]:
    """Returns the members' ranks in the default group, if they are in one, else in the new group."""
    ranks = tuple(each.global_rank for each in handles)
    return ranks if min(ranks) >= 0 and len(set(ranks)) == len(ranks) else tuple(range(len(ranks)))


def _not_formed(rank: int, error: Exception) -> ProcessGroupError:
    who = f"rank {rank} of the last group" if rank >= 0 else "this process"
    return ProcessGroupError(
        f"{who} could not form the group anew: {error}. Call reconfigure again on all members"
    )


@final
class ReconfigureRound:
    """One process's way through the rounds.

    Args:
        store: shared by all processes that may become members.
        arrival: what this process says.
        min_size: members that the group needs.
        max_size: members with which the round ends at once; None if there is no such number.
        window_s: seconds without another arrival after which the round ends, though ranks of the last group are
            missing.
    """

    def __init__(
        self, store: TorchStore, arrival: Arrival, *, min_size: int, max_size: int | None, window_s: float
    ) -> None:
        self._store = store
        self._arrival = arrival
        self._min_size = min_size
        self._max_size = max_size
        self._window_s = window_s

    def run(self, timeout_s: float) -> tuple[int, list[str]]:
        """Returns the number of the round, and the handles of its members in the order of their new ranks.

        Raises ProcessGroupError if not enough members arrived within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        number = self._store.add("round", 0)
        while True:
            own_key = _arrival_key(number, self._store.add(f"{number}/arrivals", 1) - 1)
            try:
                self._store.set(own_key, self._arrival.to_text())
                members = self._wait_for_members(number, deadline)
            except BaseException:  # also a KeyboardInterrupt: the others must not count on this process
                with suppress(RuntimeError):
                    self._store.set(own_key, "")
                raise
            if members is None:
                self._store.set(own_key, "")
                members = self._members(number)  # another member may have ended the round just now
            if members is None:
                raise ProcessGroupError(self._timeout_message(number, timeout_s))
            if self._arrival.handle.to_text() in members:
                return number, members
            self._store.compare_set("round", str(number), str(number + 1))
            number = max(number + 1, self._store.add("round", 0))

    def _wait_for_members(self, number: int, deadline: float) -> list[str] | None:
        """Returns the members of a round, which this member ends if nobody else does; None after the deadline."""
        seen = -1
        last_change = time.monotonic()
        while (members := self._members(number)) is None:
            arrivals, count, awaited = self._arrivals(number)
            now = time.monotonic()
            if count != seen:
                seen, last_change = count, now
            if self._is_complete(arrivals, now - last_change):
                self._end(number, arrivals)
                continue
            if now >= deadline:
                return None
            wait_s = min(deadline - now, MAX_WAIT_S)
            if len(arrivals) >= self._min_size:
                wait_s = min(wait_s, last_change + self._window_s - now)
            wait_for_keys(self._store, [_arrival_key(number, awaited)], max(wait_s, MIN_WAIT_S))
        return members

    def _is_complete(self, arrivals: Sequence[Arrival], quiet_s: float) -> bool:
        """Returns whether the round may end: all who can come have, or nobody has for long enough."""
        if self._max_size is not None and len(arrivals) >= self._max_size:
            return True
        if len(arrivals) < self._min_size:
            return False
        return quiet_s >= self._window_s or _all_have_arrived(arrivals)

    def _end(self, number: int, arrivals: Sequence[Arrival]) -> None:
        """Ends the round with these members, unless it has ended. Those without a rank come after the others."""
        chosen = sorted(arrivals[: self._max_size], key=lambda each: (each.handle.rank < 0, each.handle.rank))
        text = json.dumps([each.handle.to_text() for each in chosen])
        self._store.compare_set(f"{number}/members", "", text)
        self._store.compare_set("round", str(number), str(number + 1))

    def _members(self, number: int) -> list[str] | None:
        """Returns the handles of the members of a round; None if it has not ended."""
        # A compare-and-set from a value to itself reads a key without waiting.
        text = self._store.compare_set(f"{number}/members", _NONE, _NONE).decode()
        if text in {"", _NONE}:
            return None
        try:
            members = json.loads(text)
            if not isinstance(members, list) or not all(isinstance(each, str) for each in members):
                raise ValueError("no list of texts")
        except (ValueError, RecursionError):
            raise ProcessGroupError(unexpected_value(text, "the members of a group")) from None
        return members

    def _arrivals(self, number: int) -> tuple[list[Arrival], int, int]:
        """Returns the arrivals that have not been withdrawn, how many there have been, and the index to wait for.

        That is the first one whose member has not set it. It is about to, or has been killed: then later arrivals
        are noticed after MAX_WAIT_S.
        """
        announced = min(self._store.add(f"{number}/arrivals", 0), MAX_ARRIVALS)
        unset: list[int] = []
        found: dict[str, Arrival] = {}
        for index in range(announced):
            key = _arrival_key(number, index)
            if not self._store.check([key]):
                unset.append(index)
            elif text := self._store.get(key):
                arrival = Arrival.from_text(text)
                found.pop(arrival.handle.member, None)  # of an earlier call, which could not withdraw it
                found[arrival.handle.member] = arrival
        return list(found.values()), announced - len(unset), unset[0] if unset else announced

    def _timeout_message(self, number: int, timeout_s: float) -> str:
        arrivals, *_ = self._arrivals(number)
        return (
            f"only {len(arrivals) + 1} members arrived within {timeout_s:g} s at {describe_store(self._store)} "
            f"to form the group anew, which needs {self._min_size}: have all call reconfigure, newcomers included"
        )


def _arrival_key(number: int, index: int) -> str:
    return f"{number}/arrival/{index}"


def _all_have_arrived(arrivals: Sequence[Arrival]) -> bool:
    """Returns whether all ranks of the members' last groups have arrived, or are gone as some member knows."""
    expected: dict[str, set[int]] = {}
    gone: set[tuple[str, int]] = set()
    for each in arrivals:
        if each.generation:
            expected.setdefault(each.generation, set()).update(range(min(each.size, MAX_ARRIVALS)))
            gone.update((each.generation, rank) for rank in each.gone)
    arrived = {(each.generation, each.handle.rank) for each in arrivals}
    missing = {(generation, rank) for generation, ranks in expected.items() for rank in ranks} - gone - arrived
    return bool(expected) and not missing
