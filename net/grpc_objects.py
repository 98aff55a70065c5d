"""The gRPC servers and channels of this process, and what becomes of them in its forked children.

gRPC's threads do not survive a fork. In a child nothing of it works: what the child makes waits for ever or ends
the child by a signal, and so does what it frees, as a garbage collection or the end of the child would. So servers
and channels are noted here: children keep those of their parent for ever, and learn that they can make none.
"""

import os
from typing import TypeVar

from .inheritance import keep_in_children

__all__ = ["note_grpc", "why_grpc_is_unusable"]

T = TypeVar("T")

_user: int | None = None
"""The process, this one or one that it was forked from, that has used gRPC first."""


def note_grpc(made: T) -> T:
    """Notes a server or a channel of gRPC that this process has made, and returns it."""
    global _user  # noqa: PLW0603 - a process has one gRPC
    if _user is None:
        _user = os.getpid()
    return keep_in_children(made)


def why_grpc_is_unusable() -> str:
    """Returns why this process cannot use gRPC; empty if it can."""
    if _user in (None, os.getpid()):
        return ""
    return (
        f"process {_user}, from which this process {os.getpid()} was forked, has used gRPC, which cannot be used "
        "in a fork then: start processes with spawn or forkserver"
    )
