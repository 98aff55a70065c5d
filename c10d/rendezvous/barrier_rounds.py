"""The rounds of a start barrier, in the store.

One store may serve several groups, one after the other, and failed attempts. Each attempt is a round, counted from
0. A round ends with an outcome, which is published once, by compare-and-set, so that all processes read the same:
success, a failure, or a conflict between two processes. A conflict is also reported to every process that arrives
after it.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from ...errors import RendezvousError
from ...net.exchanged_values import parse_list, unexpected_value
from ...net.security import printable_lines
from ..stores.torch_store import wait as wait_for_keys
from ..torch_types import TorchStore

__all__ = ["BarrierRounds", "Outcome"]

MAX_ERROR_CHARACTERS = 16 * 1024
"""Characters that are shown of why a round has failed, which may name many members."""


class Outcome(NamedTuple):
    """How a round has ended.

    error: why no group can form; empty if all members have arrived.
    is_conflict: whether later processes must hear of the error too. A timeout concerns only those that waited.
    """

    error: str
    is_conflict: bool = True

    @classmethod
    def from_json(cls, text: bytes | str) -> "Outcome":
        """Reads an outcome from the store.

        Raises:
            RendezvousError: `text` is something else.
        """
        try:
            error, is_conflict = parse_list(text, str, bool)
        except ValueError:
            raise RendezvousError(unexpected_value(text, "the outcome of a rendezvous")) from None
        return cls(printable_lines(error, MAX_ERROR_CHARACTERS), is_conflict)


@final
class BarrierRounds:
    """The rounds of one kind of group in one store, as one process sees them.

    number: of this process's current round.

    Args:
        store: shared by the members.
        prefix: of the keys.
        process: random id of this process.
    """

    def __init__(self, store: TorchStore, prefix: str, process: str) -> None:
        self._store = store
        self._prefix = prefix
        self._process = process
        self.number = 0

    def key(self, *parts: object) -> str:
        """Returns a key of the current round."""
        return self.key_of(self.number, *parts)

    def key_of(self, number: int, *parts: object) -> str:
        """Returns a key of a round."""
        return "/".join((self._prefix, str(number), *map(str, parts)))

    def shared_key(self, *parts: object) -> str:
        """Returns a key that all rounds share."""
        return "/".join((self._prefix, *map(str, parts)))

    def begin(self) -> Outcome | None:
        """Enters the open round. Returns the conflict of an earlier round if this process has not seen it."""
        counter = self.shared_key("round")
        self.number = self._store.add(counter, 0)
        while self._store.check([self.key("outcome")]):
            outcome = self.outcome()
            if outcome.is_conflict and not self._store.check([self.key("seen_by", self._process)]):
                return outcome
            following = str(self.number + 1)
            self.number = int(self._store.compare_set(counter, str(self.number), following))
        return None

    def publish(self, outcome: Outcome) -> None:
        """Ends the round with this outcome, unless it has one."""
        self._store.compare_set(self.key("outcome"), "", json.dumps(outcome))

    def outcome(self) -> Outcome:
        """Waits for the outcome of the round, and returns it."""
        return Outcome.from_json(self._store.get(self.key("outcome")))

    def has_outcome(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` seconds for the outcome; returns whether there is one."""
        return wait_for_keys(self._store, [self.key("outcome")], timeout_s)

    def mark_seen(self, rank: int) -> None:
        """Records that this process, of this rank, has read the outcome."""
        self._store.set(self.key("seen_by", self._process), "")
        self._store.set(self.key("seen_by_rank", rank), "")

    def seen_keys(self, ranks: Sequence[int]) -> list[str]:
        """Returns the keys that are set once these ranks have read the outcome."""
        return [self.key("seen_by_rank", rank) for rank in ranks]

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of these keys."""
        store: Any = self._store  # torch's stubs lack these two methods
        return list(store.multi_get(list(keys))) if store.has_extended_api() else [store.get(key) for key in keys]
