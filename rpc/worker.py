"""Who a worker is."""

import re
from dataclasses import dataclass

__all__ = ["WorkerInfo", "check_worker_name"]

_NAME = re.compile(r"[A-Za-z0-9_:.\-]{1,128}")


@dataclass(frozen=True, slots=True, order=True)
class WorkerInfo:
    """A worker of the group: its name, and its id (the rank in a static group)."""

    name: str
    id: int


def check_worker_name(name: object) -> str:
    """The name, if it can be one.

    Raises:
        ValueError: it is no string of 1 to 128 letters, digits, `-`, `_`, `:` or `.`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"worker name {name!r} is not valid: use 1 to 128 letters, digits, '-', '_', ':' or '.'")
    return name
