"""Agreement of processes, through their store, on which of them form a group anew.

Rounds are numbered, and one is open at a time. Whoever calls adds its arrival to the open round, and waits. One
member ends the round, by a compare-and-set of the list of members, so all read the same list. A member that is not
on it (it came too late) goes on to the next round. A member whose time is up, or that is interrupted, withdraws
its arrival. One that is killed may leave an index without an arrival.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, final

from ...errors import ProcessGroupError
from ...net.exchanged_values import parse_dict, unexpected_value
from ..stores.views import describe_store, wait_for_keys
from ..torch_types import TorchStore
from .handles import GroupHandle

__all__ = ["Arrival", "ReconfigureRound"]

MAX_WAIT_S = 1.0
"""Seconds after which a member that waits for arrivals looks whether another member has ended the round."""

MIN_WAIT_S = 0.001
"""torch's stores take a shorter timeout for none at all."""

MAX_ARRIVALS = 65536
"""Arrivals of one round that are read."""

_NONE: Final = "none"


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
        """Reads the result of `to_text`.

        Raises:
            ProcessGroupError: `text` is something else.
        """
        try:
            found = parse_dict(text, {"handle": str, "generation": str, "size": int, "gone": list})
            handle = GroupHandle.from_text(found["handle"])
            if any(type(rank) is not int for rank in found["gone"]):
                raise ValueError("a rank is no number")
        except ValueError:
            raise ProcessGroupError(unexpected_value(text, "the arrival of a member")) from None
        return cls(handle=handle, generation=found["generation"], size=found["size"], gone=tuple(found["gone"]))


@final
class ReconfigureRound:
    """One process's way through the rounds.

    Args:
        store: shared by all processes that may become members.
        arrival: what this process says.
        min_size: members that the group needs.
        max_size: members with which the round ends at once; None if there is no such number.
        window_s: seconds without another arrival after which the round ends, if ranks of the last group are
            missing of which nobody knows that they are gone.
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

        Raises:
            ProcessGroupError: not enough members arrived within `timeout_s` seconds.
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
