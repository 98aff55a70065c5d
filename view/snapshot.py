"""The state of one worker, as JSON values: docs/view.md has the schema.

`snapshot` makes it, with what the threads of this process do. `problem_of` checks that of another worker, so that
those who show it need not.
"""

import linecache
import os
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

import psutil
import torch

from ..autograd.extension import Autograd
from ..c10d.debug.call_site import is_in_library
from ..c10d.groups.process_group import ProcessGroup
from ..net.peer_text import printable
from ..rpc.contracts.agent import RpcAgent
from ..rref.forks import References
from ..torch_internals import known_groups
from .statistics import BOUNDS_S, CallStatistics
from .timeline import COUNTERS

__all__ = [
    "VERSION",
    "problem_of",
    "process_groups",
    "snapshot",
    "stacks",
]

_MAX_THREADS = 256
_MAX_FRAMES = 64
"""Of a thread; the innermost ones."""

_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = f"{sysconfig.get_path('purelib')}{os.sep}"

MAX_LINE_CHARACTERS = 500
"""Of a line of the log."""

VERSION = 1
"""The version of the schema; it grows when a name is removed or changes its meaning."""

MAX_GROUPS = 64

MAX_MESSAGES = 32
"""Sends and receives in flight that are shown of a group."""

MAX_CONTEXTS = 256
"""Autograd contexts that are shown; the oldest ones."""

_TRAFFIC = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")

_MAX_RANKS = 1 << 16
"""Ranks of a process group; a worker that tells of more is not believed."""

MAX_NUMBER = 1 << 63


def stacks() -> list[dict[str, Any]]:
    """Returns the stack of each thread that runs Python, as JSON values; the innermost frame is the first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = sys._current_frames()
    found = []
    for identifier, frame in list(frames.items())[:_MAX_THREADS]:
        thread = threads.get(identifier)
        name = printable(thread.name) if thread is not None else f"thread {identifier}"
        is_main = thread is threading.main_thread()
        found.append({"thread": name, "is_main": is_main, "frames": _frames(frame)})
    return sorted(found, key=lambda each: (not each["is_main"], each["thread"]))


def _current_line() -> str | None:
    """Returns which line of the user's program the main thread is in, and in which function.

    That is the innermost line which is not of gradwire, torch or Python's library; None if there is none.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)
        if not (is_standard or file.startswith("<") or is_in_library(file)):
            return printable(f"{file}:{frame.f_lineno} in {frame.f_code.co_qualname}", 500)
        frame = frame.f_back
    return None


def _frames(innermost: FrameType) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < _MAX_FRAMES:
        code = frame.f_code
        found.append(
            {
                "file": printable(code.co_filename, 500),
                "line": frame.f_lineno,
                "function": printable(code.co_qualname),
                "text": printable(linecache.getline(code.co_filename, frame.f_lineno or 0).strip()),
            }
        )
        frame = frame.f_back
    return found


def snapshot(
    agent: RpcAgent,
    process: psutil.Process,
    events: Sequence[Mapping[str, Any]],
    log: Sequence[tuple[float, str]],
    left: Collection[str],
) -> dict[str, Any]:
    """Returns the state of a worker, with what has happened to others lately and the last lines of its log.

    The workers with the names `left` have left on purpose: nobody has lost them.
    """
    info = agent.debug_info()
    statistics = agent.extension(CallStatistics)
    return {
        "version": VERSION,
        "time": time.time(),
        "worker": {
            "name": agent.info.name,
            "id": agent.info.id,
            "incarnation": agent.info.wire_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "dynamic": agent.dynamic,
            "at": _current_line(),
        },
        "process": _process(process),
        "links": _links(info),
        "lost": {name: reason for name, reason in info["lost_workers"].items() if name not in left},
        "traffic": {**{name: info[name] for name in _TRAFFIC}, "by_worker": info["traffic"]},
        "calls": {
            "is_on": statistics.is_on,
            "sent": statistics.sent(),
            "served": statistics.served(),
            "waiting": statistics.waiting,
            "not_begun": statistics.not_begun,
            "unanswered": dict(info["unanswered_calls"]),
        },
        "queues": {
            "executor": {name: info[key] for name, key in _EXECUTOR.items()},
            "flow_control": {name: dict(figures) for name, figures in info["flow_control"].items()},
        },
        "references": _references(agent, info),
        "contexts": _contexts(agent),
        "streams": {name: info[key] for name, key in _STREAMS.items()},
        "collectives": [dict(each) for each in info["collectives"]],
        "process_groups": process_groups(),
        "refused": dict(info["refused_messages"]),
        "audit": {name: dict(counts) for name, counts in info["audit"].items()},
        "events": [dict(each) for each in events],
        "log": [{"time": when, "text": printable(text, MAX_LINE_CHARACTERS)} for when, text in log],
        "timeline": statistics.timeline(),
        "cuda": info["cuda"],
    }


def _process(process: psutil.Process) -> dict[str, Any]:
    """Returns what a process uses of the machine."""
    on_devices = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        on_devices = sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
    return {
        "cpu_percent": process.cpu_percent(),
        "memory_bytes": process.memory_info().rss,
        "gpu_memory_bytes": on_devices,
        "started": process.create_time(),
    }


_EXECUTOR = {
    "threads": "executor_threads",
    "idle": "agent.num_idle_threads",
    "queued": "agent.num_pending_requests",
    "running": "agent.server_active_calls",
    "running_async": "agent.server_active_async_calls",
}
_STREAMS = {
    "consumed": "num_consumed_streams",
    "produced": "num_produced_streams",
    "bytes_received": "stream_bytes_received",
    "bytes_sent": "stream_bytes_sent",
}


def _links(info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the state of the link to each worker, and what carries its messages and payloads."""
    transports, channels = info["transports"], info["channels"]
    return {
        name: {**link, "transport": transports.get(name), "channels": channels.get(name)}
        for name, link in info["links"].items()
    }


def _references(agent: RpcAgent, info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how many references there are: to values of this worker by holder, and those held here by owner."""
    references = agent.extension(References)
    held = Counter(fork.owner.name for fork in references.forks.copy())
    users = Counter[str]()
    for worker, count in references.table.forks_by_worker().items():
        users[agent.incarnation(worker).name] += count
    return {
        "values": info["num_owner_rrefs"],
        "held_by": dict(users),
        "held_of": dict(held),
        "unconfirmed": info["num_pending_users"],
    }


def _contexts(agent: RpcAgent) -> dict[str, Any]:
    found = sorted(agent.extension(Autograd).contexts.all(), key=lambda context: context.since)
    now = time.time()
    shown = [
        {
            "id": context.id,
            "creator": printable(agent.incarnation(context.creator).name),
            "age_s": now - context.since,
            "backward": context.passes.is_running,
        }
        for context in found[:MAX_CONTEXTS]
    ]
    return {"count": len(found), "oldest": shown}


def process_groups() -> list[dict[str, Any]]:
    """Returns gradwire's process groups as JSON values, with their last collective and messages in flight."""
    groups = [group for group in list(known_groups()) if isinstance(group, ProcessGroup)]
    # One that is to be formed by `reconfigure` has no ranks yet.
    return [_group(group) for group in groups[:MAX_GROUPS] if group.size() > 0]


def _group(group: ProcessGroup) -> dict[str, Any]:
    record = group.flight_record()
    operations = record["operations"]
    collectives = [each for each in operations if each["kind"] == "collective"]
    messages = [each for each in operations if each["kind"] != "collective" and each["state"] == "in flight"]
    return {
        **{name: record[name] for name in ("name", "backend", "rank", "size", "global_ranks")},
        "failure": str(group.failure) if group.failure is not None else None,
        "collective": _operation(collectives[-1]) if collectives else None,
        "messages": [_operation(each) for each in messages[-MAX_MESSAGES:]],
    }


def _operation(operation: dict[str, Any]) -> dict[str, Any]:
    names = ("number", "operation", "state", "error", "peer", "bytes", "call_site")
    return {**{name: operation[name] for name in names}, "since": operation["began"]}


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


def _check_group(value: Any) -> str | None:
    if (problem := _problem(value, _GROUP_FIELDS)) is not None:
        return problem
    return None if value["rank"] < value["size"] <= _MAX_RANKS else ".rank is none of the group"


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
        **_names(_count, *_TRAFFIC),
        "by_worker": _ByName(_LINK_TRAFFIC),
    },
    "calls": {
        "sent": [
            {**_CALL, "worker": _text, "in_flight": _count, "oldest_s": _OrNone(_number), "failures": _COUNTS}
        ],
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
    "process_groups": [_check_group],
    "events": [{"time": _number, **_names(_text, "event", "worker", "reason")}],
    "log": [{"time": _number, "text": _text}],
    "timeline": _timeline,
}
