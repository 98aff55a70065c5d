"""The values of one all_gather round: what identifies it, what a member contributes, and its result."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from ..contracts.worker import WorkerInfo
from .group_rounds import NextRound

__all__ = ["GROUP_TOPIC", "Round", "RoundKey", "RoundResult", "Series"]

GROUP_TOPIC = "user"
"""The topic whose rounds may go through process groups: the collectives that users call."""


class Series(NamedTuple):
    """Identifies the consecutive rounds of one topic among the same members."""

    topic: str
    members: tuple[int, ...]
    """Worker ids, ascending."""


class RoundKey(NamedTuple):
    """Identifies one round on all of its members. It travels between workers."""

    topic: str
    number: int
    """Counts the rounds of the series, from 0."""
    members: tuple[int, ...]
    """Worker ids, ascending."""

    @property
    def series(self) -> Series:
        """The series that the round belongs to."""
        return Series(self.topic, self.members)

    @property
    def may_use_group(self) -> bool:
        """Whether rounds of this topic may go through a process group."""
        return self.topic == GROUP_TOPIC


@final
@dataclass(frozen=True, slots=True)
class Round:
    """One round, as a member takes part in it.

    key: identifies the round.
    value: what this worker contributes; anything that pickles.
    workers: all members by id, in ascending order of ids.
    timeout: seconds that the caller allows, 0 for no limit.
    deadline: when the timeout ends, on the monotonic clock; None for no limit.
    on_waiting: called now and then with the names of the members whose values are missing.
    """

    key: RoundKey
    value: object
    workers: Mapping[int, WorkerInfo]
    timeout: float
    deadline: float | None
    on_waiting: Callable[[Sequence[str]], None]

    def seconds_left(self) -> float | None:
        """Returns the seconds until the deadline, negative after it; None for no limit."""
        return None if self.deadline is None else self.deadline - time.monotonic()


class RoundResult(NamedTuple):
    """The result of one round. It travels between workers."""

    values: Mapping[int, Any]
    """The members' values by worker id. Members that died before they contributed are not in it."""
    next_round: NextRound
    """How the next round of the series is to go."""
    is_flat: bool = False
    """Whether the values are still bytes from `ValueCodec.flatten`, as they come from a process group."""
