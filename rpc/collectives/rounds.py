"""Data types of one all_gather round: what identifies it, what a member contributes, and its result.

A round is one all_gather, or one barrier, among a fixed set of workers, its members. They send their values to one
of them, the leader (all_gather.py).
"""

import copy
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from ..contracts.exposure import message_value
from ..contracts.worker import WorkerInfo

__all__ = ["USER_TOPIC", "VOID", "Round", "RoundKey", "RoundResult", "Series"]

USER_TOPIC = "user"
"""The topic of the collectives that users call.

A topic separates the collectives of one purpose from those of others among the same workers.
"""

MAX_TOPIC_CHARACTERS = 1024


class Series(NamedTuple):
    """Identifies the consecutive rounds of one topic among the same members."""

    topic: str
    members: tuple[int, ...]
    """Worker ids, ascending."""


@message_value
class RoundKey(NamedTuple):
    """Identifies one round on all of its members. Sent between workers."""

    topic: str
    number: int
    """The number of the round in its series, from 0."""
    members: tuple[int, ...]
    """Worker ids, ascending."""

    @classmethod
    def from_payload(cls, payload: object, sender: int) -> "RoundKey":
        """Returns the key that a member has sent. Raises ValueError if it is none, or the sender no member."""
        if not isinstance(payload, tuple) or len(payload) != 3:
            raise ValueError("malformed message: it names no round")
        topic, number, members = payload
        is_sound = (
            type(topic) is str
            and len(topic) <= MAX_TOPIC_CHARACTERS
            and type(number) is int
            and number >= 0
            and type(members) is tuple
            and all(type(each) is int for each in members)
            and sorted(set(members)) == list(members)
        )
        if not is_sound or sender not in members:
            raise ValueError(f"malformed message: worker {sender} is in no round of {reprlib.repr(members)}")
        return cls(topic, number, members)

    @property
    def series(self) -> Series:
        """The series that the round belongs to."""
        return Series(self.topic, self.members)


@final
@dataclass(frozen=True, slots=True)
class Round:
    """One round on one of its members.

    key: identifies the round.
    value: what this worker contributes; any value that can be pickled.
    workers: all members by worker id, in ascending order.
    timeout: seconds that the caller allows; 0 for no limit.
    deadline: when the timeout expires, in seconds of `time.monotonic`; None for no limit.
    on_waiting: called at intervals during a long wait, with the names of the members whose values are missing.
    """

    key: RoundKey
    value: object
    workers: Mapping[int, WorkerInfo]
    timeout: float
    deadline: float | None
    on_waiting: Callable[[Sequence[str]], None]

    def seconds_left(self) -> float | None:
        """Returns the seconds until the deadline, negative after the deadline; None for no limit."""
        return None if self.deadline is None else self.deadline - time.monotonic()


@message_value
class RoundResult(NamedTuple):
    """The result of one round. Sent between workers."""

    values: Mapping[int, Any]
    """The members' values by worker id, without members that died before they contributed."""
    is_void: bool = False
    """Whether the round has no values: its members are to run it again with the latest incarnation of each."""

    def copy(self) -> "RoundResult":
        """Returns a result of which the program can change nothing, but for values that cannot be copied."""
        return RoundResult({worker: _copy_of(value) for worker, value in self.values.items()}, self.is_void)


def _copy_of(value: object) -> object:
    try:
        return copy.deepcopy(value)
    except Exception:  # references, for example, which have nothing to change
        return value


VOID = RoundResult({}, is_void=True)
