"""What one worker has recorded in a profile of all workers, as it travels to the one that asks for it."""

import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from ..c10d.security.peer_text import printable

__all__ = ["MAX_BYTES", "MAX_CALLS", "Call", "Recording", "Run", "decode", "encode"]

MAX_BYTES = 256 << 20
"""Bytes of the JSON of a recording, at most."""

MAX_CALLS = 1 << 20
"""Calls, and runs of functions, that a worker records at most; it leaves out those that come later."""


class Call(NamedTuple):
    """A call that the worker has made. Times are nanoseconds since 1970, by the worker's clock.

    callee: the wire id of the worker called.
    """

    id: int
    callee: int
    method: str
    begun_ns: int
    ended_ns: int


class Run(NamedTuple):
    """A function that the worker has run for a caller.

    caller: the wire id of the worker that has called.
    id: of the call, as its caller counts.
    thread: the id of the thread, as the operating system counts.
    """

    caller: int
    id: int
    method: str
    thread: int
    begun_ns: int
    ended_ns: int


@dataclass(slots=True)
class Recording:
    """What one worker has recorded.

    process: its process id.
    base_ns: what the times of the events, in microseconds, are counted from; nanoseconds since 1970.
    events: those that torch's profiler has written, in the format of Chrome's traces.
    """

    process: int
    base_ns: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


MAX_NS = 1 << 63


def encode(recording: Recording) -> bytes:
    """Returns a recording as bytes."""
    fields = {name: getattr(recording, name) for name in Recording.__dataclass_fields__}
    return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)


def decode(data: object) -> Recording:
    """Returns the recording that another worker has encoded. Events that are malformed are left out.

    Raises:
        ValueError: the bytes are no recording, or too large a one.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"malformed recording: it is of type {type(data).__name__}")
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(data, MAX_BYTES)
        # Without NaN and infinity, which are no JSON: the merged trace could not be read.
        text = b"{}" if inflater.unconsumed_tail else text
        fields = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except (zlib.error, RecursionError, ValueError) as error:
        raise ValueError(f"malformed recording: {printable(error)}") from None
    if inflater.unconsumed_tail:
        raise ValueError(f"the recording has more than {MAX_BYTES} bytes: profile fewer steps")
    lists = ("events", "calls", "runs")
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), list) for name in lists):
        raise ValueError("malformed recording: it has no lists of events, calls and runs")
    if not _are_counts([fields.get("process"), fields.get("base_ns")]):
        raise ValueError("malformed recording: it has no process id and no time")
    return Recording(
        fields["process"],
        fields["base_ns"],
        [each for each in fields["events"] if _is_event(each)],
        [Call(*_shown(each)) for each in fields["calls"] if _is_row(each, 5)],
        [Run(*_shown(each)) for each in fields["runs"] if _is_row(each, 6)],
    )


def _finite(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None


def _is_event(event: Any) -> TypeGuard[dict[str, Any]]:
    """Returns whether an event has a phase, the id of its process, and finite times."""
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        return False
    times = event.get("ts"), event.get("dur", 0)
    are_times = all(isinstance(each, int | float) and -MAX_NS < each < MAX_NS for each in times)
    return are_times and type(event.get("pid")) is int


def _is_row(row: Any, length: int) -> bool:
    """Returns whether a list has this length, a text as its third item, and counts as all others."""
    return (
        isinstance(row, list)
        and len(row) == length
        and isinstance(row[2], str)
        and _are_counts([*row[:2], *row[3:]])
    )


def _shown(row: list[Any]) -> list[Any]:
    """Returns a list with its third item, a text, as it can be shown."""
    return [*row[:2], printable(row[2]), *row[3:]]


def _are_counts(values: list[Any]) -> bool:
    return all(type(each) is int and 0 <= each < MAX_NS for each in values)
