"""Converts profiler events between torch's classes and protobuf messages, and merges those of other workers.

torch has no way to add records to its profilers from Python. So the events of a remote function travel as
messages, and are added to the caller's profile where torch keeps finished events: in its EventList.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler_util import EventList, FunctionEvent

from ...proto.v1 import agent_pb2
from ...torch_internals import parse_legacy_records
from ..wire.parsing import parse_events

__all__ = [
    "REMOTE_PREFIX",
    "decode_events",
    "encode_records",
    "events_from_tensor",
    "events_to_tensor",
    "merge_events",
    "relabel",
]

REMOTE_PREFIX = "#remote_op: "
"""Separates, in the name of a remote event, the name of the call and that of the event. It is torch's."""

MAX_TIME_NS = 1 << 62
"""Unix time in nanoseconds that no event of another worker reaches, so that `relabel` stays within 64 bits."""


def encode_records(records: list[list[Any]], node: int) -> list[agent_pb2.ProfileEvent]:
    """Returns what torch's legacy profiler has recorded on this worker (`node`) by thread, as messages."""
    start = next(record for record in records[0] if record.name() == "__start_profile") if records else None
    if start is None:
        return []
    epoch_us = start.start_us()
    return [_encode(event, node, epoch_us) for event in parse_legacy_records(records)]


def decode_events(
    events: Iterable[agent_pb2.ProfileEvent], origin_ns: int, local_node: int | None = None
) -> list[FunctionEvent]:
    """Returns events as torch's FunctionEvents, which profiles show.

    Args:
        events: of any workers.
        origin_ns: Unix time in nanoseconds from which the decoded events count microseconds.
        local_node: the id of the worker whose events are not marked as remote; None for no worker.
    """
    return [
        _decode(event, number, origin_ns, is_remote=event.node_id != local_node)
        for number, event in enumerate(events)
    ]


def events_to_tensor(events: Iterable[agent_pb2.ProfileEvent]) -> torch.Tensor:
    """Returns events as a uint8 tensor of shape (bytes,), so that many events travel as a large tensor does."""
    data = bytearray(agent_pb2.ProfileEvents(events=events).SerializeToString())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def events_from_tensor(tensor: torch.Tensor) -> list[agent_pb2.ProfileEvent]:
    """Returns the events that `events_to_tensor` has encoded. Raises ValueError if there are none."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"malformed profile: a tensor of {tensor.dtype} with {tensor.dim()} dimensions")
    try:
        events = list(parse_events(tensor.numpy().tobytes()).events)
    except Exception as error:
        raise ValueError(f"malformed profile: {error}") from None
    if not all(0 <= time < MAX_TIME_NS for event in events for time in (event.start_ns, event.end_ns)):
        raise ValueError("malformed profile: an event of an impossible time")
    return events


def relabel(events: list[agent_pb2.ProfileEvent], key: str, start_ns: int, end_ns: int) -> None:
    """Turns a callee's events into remote events of a call, in place; `key` is the name of the call's event.

    If they are not within the time of the call, which is this worker's Unix time in nanoseconds, the clocks
    differ; they are moved to the middle of the call.
    """
    if not events:
        return
    first, last = min(event.start_ns for event in events), max(event.end_ns for event in events)
    shift = 0 if start_ns <= first and last <= end_ns else (start_ns + end_ns - first - last) // 2
    for event in events:
        event.name = f"{key}{REMOTE_PREFIX}{event.name}"
        event.start_ns += shift
        event.end_ns += shift


def merge_events(into: EventList, events: list[agent_pb2.ProfileEvent], origin_ns: int) -> None:
    """Adds events of other workers to the finished events of a profile, sorted by time.

    The profile began at `origin_ns`, in nanoseconds of Unix time.
    """
    by_worker = defaultdict(list)
    for event in decode_events(events, origin_ns):
        by_worker[event.node_id].append(event)
    for of_worker in by_worker.values():
        tree = EventList(of_worker)
        tree._build_tree()  # for each worker by itself, because threads of different workers share numbers
        into.extend(tree)
    into.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def _encode(event: FunctionEvent, node: int, epoch_us: float) -> agent_pb2.ProfileEvent:
    shapes: list[Any] = list(event.input_shapes or [])
    return agent_pb2.ProfileEvent(
        name=event.name,
        node_id=node,
        start_ns=round((epoch_us + event.time_range.start) * 1000),
        end_ns=round((epoch_us + event.time_range.end) * 1000),
        thread=event.thread,
        forward_thread=event.fwd_thread or 0,
        sequence_number=event.sequence_nr,
        scope=event.scope,
        asynchronous=event.is_async,
        shapes=[agent_pb2.Sizes(sizes=sizes) for sizes in shapes],
        stack=event.stack or [],
        cpu_memory=event.cpu_memory_usage,
        device_memory=event.device_memory_usage,
        flops=round(event.flops or 0),
        kernels=[
            agent_pb2.Kernel(name=kernel.name, device=kernel.device, duration_us=kernel.duration)
            for kernel in event.kernels
        ],
    )


def _decode(event: agent_pb2.ProfileEvent, number: int, origin_ns: int, *, is_remote: bool) -> FunctionEvent:
    decoded = FunctionEvent(
        id=number,
        name=event.name,
        trace_name=event.name,
        node_id=event.node_id,
        thread=event.thread,
        start_us=(event.start_ns - origin_ns) / 1000,
        end_us=(event.end_ns - origin_ns) / 1000,
        fwd_thread=event.forward_thread,
        input_shapes=[list(sizes.sizes) for sizes in event.shapes],
        stack=list(event.stack),
        scope=event.scope,
        cpu_memory_usage=event.cpu_memory,
        device_memory_usage=event.device_memory,
        is_async=event.asynchronous,
        is_remote=is_remote,
        sequence_nr=event.sequence_number,
        use_device="cuda" if event.kernels else None,
        is_legacy=True,
        flops=event.flops or None,
    )
    for kernel in event.kernels:
        decoded.append_kernel(kernel.name, kernel.device, kernel.duration_us)
    return decoded
