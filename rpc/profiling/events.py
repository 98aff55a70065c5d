"""Profiler events on their way between workers.

torch's profilers offer no way to make their own records from Python. So the events of a remote function travel
as messages, and join the caller's profile where torch keeps the finished ones, in its EventList.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler_util import EventList, FunctionEvent

from ...proto.v1 import agent_pb2
from ...torch_internals import parse_legacy_records

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
"""Between the name of a call and that of what the callee did in it. torch's."""


def encode_records(records: list[list[Any]], node: int) -> list[agent_pb2.ProfileEvent]:
    """What torch's legacy profiler recorded on this worker."""
    start = next(record for record in records[0] if record.name() == "__start_profile") if records else None
    if start is None:
        return []
    epoch_us = start.start_us()
    return [_encode(event, node, epoch_us) for event in parse_legacy_records(records)]


def decode_events(
    events: Iterable[agent_pb2.ProfileEvent], origin_ns: int, here: int | None = None
) -> list[FunctionEvent]:
    """Events for people: torch's FunctionEvents, with times in microseconds after `origin_ns`.

    They are marked as remote unless they are of worker `here`.
    """
    return [_decode(event, number, origin_ns, remote=event.node_id != here) for number, event in enumerate(events)]


def events_to_tensor(events: Iterable[agent_pb2.ProfileEvent]) -> torch.Tensor:
    """Events as bytes, so that many of them travel as any large tensor does."""
    data = bytearray(agent_pb2.ProfileEvents(events=events).SerializeToString())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def events_from_tensor(tensor: torch.Tensor) -> list[agent_pb2.ProfileEvent]:
    """What `events_to_tensor` made.

    Raises:
        ValueError: something else made it.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ValueError(f"malformed profile: a tensor of {tensor.dtype} with {tensor.dim()} dimensions")
    try:
        return list(agent_pb2.ProfileEvents.FromString(tensor.numpy().tobytes()).events)
    except Exception as error:
        raise ValueError(f"malformed profile: {error}") from None


def relabel(events: list[agent_pb2.ProfileEvent], key: str, start_ns: int, end_ns: int) -> None:
    """Makes the events of a callee those of a call that took from `start_ns` to `end_ns` by this worker's clock.

    Events that do not fit into the call come by a clock that differs: they are put into its middle.
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
    """Adds events of other workers to the finished ones of a profile that began at `origin_ns`."""
    by_worker = defaultdict(list)
    for event in decode_events(events, origin_ns):
        by_worker[event.node_id].append(event)
    for several in by_worker.values():
        tree = EventList(several)
        tree._build_tree()  # for each worker: threads of different ones have the same numbers
        into.extend(tree)
    into.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def _encode(event: FunctionEvent, node: int, epoch_us: float) -> agent_pb2.ProfileEvent:
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
        shapes=[agent_pb2.Sizes(sizes=sizes) for sizes in _shapes(event)],
        stack=event.stack or [],
        cpu_memory=event.cpu_memory_usage,
        device_memory=event.device_memory_usage,
        flops=round(event.flops or 0),
        kernels=[
            agent_pb2.Kernel(name=kernel.name, device=kernel.device, duration_us=kernel.duration)
            for kernel in event.kernels
        ],
    )


def _decode(event: agent_pb2.ProfileEvent, number: int, origin_ns: int, *, remote: bool) -> FunctionEvent:
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
        is_remote=remote,
        sequence_nr=event.sequence_number,
        use_device="cuda" if event.kernels else None,
        is_legacy=True,
        flops=event.flops or None,
    )
    for kernel in event.kernels:
        decoded.append_kernel(kernel.name, kernel.device, kernel.duration_us)
    return decoded


def _shapes(event: FunctionEvent) -> list[Any]:
    return list(event.input_shapes or [])
