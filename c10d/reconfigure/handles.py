"""Handles of the members of a group that is formed anew: texts by which a process names itself to the others.

They are what torch calls reconfigure handles. A member's id stays the same as long as its group object lives; the
ranks in a handle are those of its last group.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Self, final

from ...net.exchanged_values import parse_dict

__all__ = ["GroupHandle", "parse_handles"]

MAX_HANDLE_CHARACTERS = 256


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
        """Reads the result of `to_text`.

        Raises:
            ValueError: `text` is something else.
        """
        try:
            if not isinstance(text, str) or len(text) > MAX_HANDLE_CHARACTERS:
                raise ValueError("too long, or no text")
            return cls(**parse_dict(text, {"member": str, "rank": int, "global_rank": int}))
        except ValueError:
            raise ValueError(
                f"{str(text)[:80]!r} is no handle of a gradwire group: give what get_reconfigure_handle() returned"
            ) from None


def parse_handles(texts: Collection[str]) -> list[GroupHandle]:
    """Returns the members of a new group in the order of their ranks there.

    Args:
        texts: a list assigns ranks by position. In a set, members keep the order of their last ranks, and those
            without one come after them, in the order of their ids.

    Raises:
        ValueError: `texts` is empty, names a member twice, or has something that is no handle.
    """
    if isinstance(texts, str) or not texts:
        raise ValueError(f"the handles are {texts!r}: give a list or set of the handles of all members")
    handles = [GroupHandle.from_text(text) for text in texts]
    if isinstance(texts, set | frozenset):
        handles.sort(key=lambda each: (each.rank < 0, each.rank, each.member))
    if len({each.member for each in handles}) < len(handles):
        raise ValueError("the handles name one member twice: give each member's once")
    return handles
