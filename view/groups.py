"""The process groups of this process, and which collective each is in."""

from typing import Any

from ..c10d.groups.process_group import ProcessGroup
from ..torch_internals import known_groups

__all__ = ["process_groups"]

MAX_GROUPS = 64
MAX_MESSAGES = 32
"""Sends and receives in flight that are shown of a group."""


def process_groups() -> list[dict[str, Any]]:
    """Returns gradwire's process groups as JSON values, with their last collective and messages in flight."""
    groups = [group for group in list(known_groups()) if isinstance(group, ProcessGroup)]
    # One that is to be formed by `reconfigure` has no ranks yet.
    return [_describe(group) for group in groups[:MAX_GROUPS] if group.size() > 0]


def _describe(group: ProcessGroup) -> dict[str, Any]:
    record = group.flight_record()
    operations = record["operations"]
    collectives = [each for each in operations if each["kind"] == "collective"]
    messages = [each for each in operations if each["kind"] != "collective" and each["state"] == "in flight"]
    return {
        **{name: record[name] for name in ("name", "backend", "rank", "size", "global_ranks")},
        "failure": str(group.failure) if group.failure is not None else None,
        "collective": _shown(collectives[-1]) if collectives else None,
        "messages": [_shown(each) for each in messages[-MAX_MESSAGES:]],
    }


def _shown(operation: dict[str, Any]) -> dict[str, Any]:
    names = ("number", "operation", "state", "error", "peer", "bytes", "call_site")
    return {**{name: operation[name] for name in names}, "since": operation["began"]}
