"""What the state of a worker must have, so that those who show it need not check it. docs/view.md describes it."""

from collections.abc import Callable, Mapping
from typing import Any

from ..net.peer_text import printable
from .histogram import BOUNDS_S
from .timeline import COUNTERS

__all__ = ["MAX_RANKS", "problem_of"]

MAX_RANKS = 1 << 16
"""Ranks of a process group; a worker that tells of more is not believed."""

MAX_NUMBER = 1 << 63

Check = Callable[[Any], str | None]
"""Returns where a value is malformed and what it should be, as ".name is no text"; None if it is not malformed."""


def problem_of(state: object) -> str | None:
    """Returns what is malformed in the state that a worker has answered with; None if nothing is.

    Only what is read of a state is checked: by the page, the metrics, the terminal, and the search for waits.
    """
    problem = _STATE(state)
    return None if problem is None else printable(problem.removeprefix("."), 200)


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


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _each(check: Check) -> Check:
    def check_list(value: Any) -> str | None:
        if not isinstance(value, list):
            return " is no list"
        problems = (f"[{i}]{problem}" for i, each in enumerate(value) if (problem := check(each)) is not None)
        return next(problems, None)

    return check_list


def _list_of(check: Check, length: int) -> Check:
    def check_length(value: Any) -> str | None:
        if (problem := _each(check)(value)) is not None:
            return problem
        return None if len(value) == length else f" has not {length} values"

    return check_length


def _by_name(check: Check) -> Check:
    def check_values(value: Any) -> str | None:
        if not isinstance(value, dict):
            return " has no names"
        problems = (f".{name}{problem}" for name, each in value.items() if (problem := check(each)) is not None)
        return next(problems, None)

    return check_values


def _with(fields: Mapping[str, Check]) -> Check:
    def check_fields(value: Any) -> str | None:
        if not isinstance(value, dict):
            return " has no names"
        for name, check in fields.items():
            if name not in value:
                return f".{name} is missing"
            if (problem := check(value[name])) is not None:
                return f".{name}{problem}"
        return None

    return check_fields


def _names(check: Check, *names: str) -> dict[str, Check]:
    return dict.fromkeys(names, check)


_COUNTS = _by_name(_count)
_DURATION = _with(
    {"total_s": _number, **_names(_or_none(_number), "p50_s", "p99_s"), "within": _list_of(_count, len(BOUNDS_S))}
)
_LAST_ERROR = _or_none(_with({"time": _number, "text": _text}))
_COLLECTIVE = _with(
    {**_names(_text, "operation", "state"), "number": _count, "since": _number, "call_site": _or_none(_text)}
)
_GROUP_FIELDS = _with(
    {
        **_names(_text, "name", "backend"),
        **_names(_count, "rank", "size"),
        "global_ranks": _each(_count),
        "failure": _or_none(_text),
        "collective": _or_none(_COLLECTIVE),
    }
)


def _group(value: Any) -> str | None:
    if (problem := _GROUP_FIELDS(value)) is not None:
        return problem
    return None if value["rank"] < value["size"] <= MAX_RANKS else ".rank is none of the group"


_TIMELINE_COLUMNS = _with(_names(_each(_number), "ended", "seconds", *COUNTERS))


def _timeline(value: Any) -> str | None:
    if (problem := _TIMELINE_COLUMNS(value)) is not None:
        return problem
    lengths = {len(value[name]) for name in ("ended", "seconds", *COUNTERS)}
    return None if len(lengths) == 1 else " has columns of different lengths"


_STATE = _with(
    {
        "time": _number,
        "worker": _with({"host": _text, "at": _or_none(_text), "pid": _count}),
        "process": _with(
            {**_names(_number, "cpu_percent", "started"), **_names(_count, "memory_bytes", "gpu_memory_bytes")}
        ),
        "links": _by_name(_with({"state": _text, "transport": _or_none(_text)})),
        "lost": _by_name(_text),
        "traffic": _with(
            {
                **_names(_count, "messages_sent", "messages_received", "bytes_sent", "bytes_received"),
                "by_worker": _by_name(
                    _with({"messages_sent": _count, **_names(_COUNTS, "bytes_sent", "bytes_received")})
                ),
            }
        ),
        "calls": _with(
            {
                "sent": _each(
                    _with(
                        {
                            **_names(_text, "function", "worker"),
                            **_names(_count, "count", "in_flight"),
                            "failures": _COUNTS,
                            "last_error": _LAST_ERROR,
                            "duration": _DURATION,
                        }
                    )
                ),
                "served": _each(
                    _with(
                        {
                            **_names(_text, "function", "caller"),
                            **_names(_count, "count", "running", "failed"),
                            "last_error": _LAST_ERROR,
                            "duration": _DURATION,
                        }
                    )
                ),
                "unanswered": _COUNTS,
            }
        ),
        "queues": _with(
            {
                "executor": _with(_names(_count, "threads", "running", "queued")),
                "flow_control": _by_name(
                    _with(_names(_count, "send_queue_bytes", "calls_in_flight", "waiting_calls"))
                ),
            }
        ),
        "references": _with({"values": _count, **_names(_COUNTS, "held_by", "held_of")}),
        "contexts": _with(
            {
                "count": _count,
                "oldest": _each(_with({"id": _identifier, "creator": _text, "age_s": _number, "backward": _flag})),
            }
        ),
        "streams": _with(_names(_count, "produced", "consumed", "bytes_sent", "bytes_received")),
        "collectives": _each(
            _with(
                {
                    **_names(_text, "operation", "topic"),
                    "number": _count,
                    "members": _each(_text),
                    "since": _number,
                    "call_site": _or_none(_text),
                }
            )
        ),
        "process_groups": _each(_group),
        "events": _each(_with({"time": _number, **_names(_text, "event", "worker", "reason")})),
        "log": _each(_with({"time": _number, "text": _text})),
        "timeline": _timeline,
    }
)
