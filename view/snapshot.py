"""The state of one worker, as JSON values: docs/view.md has the schema."""

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch

from ..autograd.extension import Autograd
from ..c10d.groups.process_group import ProcessGroup
from ..net.peer_text import printable
from ..rpc.contracts.agent import RpcAgent
from ..rref.forks import References
from ..torch_internals import known_groups
from .stacks import current_line
from .statistics import CallStatistics

__all__ = ["VERSION", "process_groups", "snapshot"]

MAX_LINE_CHARACTERS = 500
"""Of a line of the log."""

VERSION = 1
"""The version of the schema; it grows when a name is removed or changes its meaning."""

MAX_GROUPS = 64
MAX_MESSAGES = 32
"""Sends and receives in flight that are shown of a group."""

MAX_CONTEXTS = 256
"""Autograd contexts that are shown; the oldest ones."""


def snapshot(
    agent: RpcAgent,
    process: psutil.Process,
    events: Sequence[Mapping[str, Any]],
    log: Sequence[tuple[float, str]],
) -> dict[str, Any]:
    """Returns the state of a worker, with what has happened to others lately and the last lines of its log."""
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
            "at": current_line(),
        },
        "process": _process(process),
        "links": _links(info),
        "lost": dict(info["lost_workers"]),
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


_TRAFFIC = ("messages_sent", "messages_received", "bytes_sent", "bytes_received")
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
