"""What the state of a worker must have, so that those who show it need not check it. docs/view.md describes it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

from ..net.peer_text import printable
from .histogram import BOUNDS_S
from .timeline import COUNTERS

__all__ = ["MAX_RANKS", "problem_of"]

MAX_RANKS = 1 << 16
"""Ranks of a process group; a worker that tells of more is not believed."""

MAX_NUMBER = 1 << 63

Check = Callable[[Any], str | None]
"""Returns where a value is malformed and what it should be, as ".name is no text"; None if it is not malformed."""

Schema = Any
"""What a value must have: a check; a dict with a schema for each name; a list with the schema of each element."""


@final
@dataclass(frozen=True, slots=True)
class _OrNone:
    """The schema of a value that may be None."""

    schema: Schema


@final
@dataclass(frozen=True, slots=True)
class _ByName:
    """The schema of a dict whose names are not known."""

    schema: Schema


def problem_of(state: object) -> str | None:
    """Returns what is malformed in the state that a worker has answered with; None if nothing is.

    Only what is read of a state is checked: by the page, the metrics, the terminal, and the search for waits.
    """
    problem = _problem(state, _STATE)
    return None if problem is None else printable(problem.removeprefix("."), 200)


def _problem(value: Any, schema: Schema) -> str | None:
    """Returns what is malformed in a value, as a Check does."""
    inner: Iterable[tuple[str, Any, Schema]]
    match schema:
        case _OrNone():
            return None if value is None else _problem(value, schema.schema)
        case list():
            if not isinstance(value, list):
                return " is no list"
            inner = ((f"[{i}]", each, schema[0]) for i, each in enumerate(value))
        case _ByName() | dict():
            if not isinstance(value, dict):
                return " has no names"
            if isinstance(schema, _ByName):
                schema = dict.fromkeys(value, schema.schema)
            elif missing := [name for name in schema if name not in value]:
                return f".{missing[0]} is missing"
            inner = ((f".{name}", value[name], each) for name, each in schema.items())
        case _:
            problem: str | None = schema(value)
            return problem
    found = (f"{where}{problem}" for where, each, of in inner if (problem := _problem(each, of)) is not None)
    return next(found, None)


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else " is no text"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else " is neither true nor false"


def _number(value: Any) -> str | None:
    is_number = type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER
    return None if is_number else " is no number"


def _count(value: Any) -> str | None:
    return None if type(value) is int and 0 <= value < MAX_NUMBER else " is no count"


def _identifier(value: Any) -> str | None:
    return None if type(value) is int and 0 <= value < 1 << 64 else " is no id"


def _within(value: Any) -> str | None:
    if (problem := _problem(value, [_count])) is not None:
        return problem
    return None if len(value) == len(BOUNDS_S) else f" has not {len(BOUNDS_S)} values"


def _group(value: Any) -> str | None:
    if (problem := _problem(value, _GROUP_FIELDS)) is not None:
        return problem
    return None if value["rank"] < value["size"] <= MAX_RANKS else ".rank is none of the group"


def _timeline(value: Any) -> str | None:
    columns = ("ended", "seconds", *COUNTERS)
    if (problem := _problem(value, _names([_number], *columns))) is not None:
        return problem
    is_even = len({len(value[name]) for name in columns}) == 1
    return None if is_even else " has columns of different lengths"


def _names(check: Schema, *names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, check)


_COUNTS = _ByName(_count)
_DURATION = {"total_s": _number, **_names(_OrNone(_number), "p50_s", "p99_s"), "within": _within}
_CALL = {
    "function": _text,
    "count": _count,
    "duration": _DURATION,
    "last_error": _OrNone({"time": _number, "text": _text}),
}
_COLLECTIVE = {"operation": _text, "number": _count, "since": _number, "call_site": _OrNone(_text)}
_GROUP_FIELDS = {
    **_names(_text, "name", "backend"),
    **_names(_count, "rank", "size"),
    "global_ranks": [_count],
    "failure": _OrNone(_text),
    "collective": _OrNone({"state": _text, **_COLLECTIVE}),
}
_LINK_TRAFFIC = {"messages_sent": _count, **_names(_COUNTS, "bytes_sent", "bytes_received")}
_STATE = {
    "time": _number,
    "worker": {"host": _text, "at": _OrNone(_text), "pid": _count},
    "process": {**_names(_number, "cpu_percent", "started"), **_names(_count, "memory_bytes", "gpu_memory_bytes")},
    "links": _ByName({"state": _text, "transport": _OrNone(_text)}),
    "lost": _ByName(_text),
    "traffic": {
        **_names(_count, "messages_sent", "messages_received", "bytes_sent", "bytes_received"),
        "by_worker": _ByName(_LINK_TRAFFIC),
    },
    "calls": {
        "sent": [{**_CALL, "worker": _text, "in_flight": _count, "failures": _COUNTS}],
        "served": [{**_CALL, "caller": _text, **_names(_count, "running", "failed")}],
        "unanswered": _COUNTS,
    },
    "queues": {
        "executor": _names(_count, "threads", "running", "queued"),
        "flow_control": _ByName(_names(_count, "send_queue_bytes", "calls_in_flight", "waiting_calls")),
    },
    "references": {"values": _count, **_names(_COUNTS, "held_by", "held_of")},
    "contexts": {
        "count": _count,
        "oldest": [{"id": _identifier, "creator": _text, "age_s": _number, "backward": _flag}],
    },
    "streams": _names(_count, "produced", "consumed", "bytes_sent", "bytes_received"),
    "collectives": [{"topic": _text, "members": [_text], **_COLLECTIVE}],
    "process_groups": [_group],
    "events": [{"time": _number, **_names(_text, "event", "worker", "reason")}],
    "log": [{"time": _number, "text": _text}],
    "timeline": _timeline,
}
