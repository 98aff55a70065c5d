"""What a profile of all workers asks of each, and what that has recorded, as they travel."""

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeGuard, final

from ..net.peer_text import printable

__all__ = [
    "MAX_BYTES",
    "MAX_CALLS",
    "MIN_BYTES",
    "MOST_BYTES",
    "SETTINGS",
    "Call",
    "ProfileRequest",
    "Recording",
    "Run",
    "decode",
    "encode",
    "read_profile_id",
]

MAX_BYTES = 64 << 20
"""Bytes of the JSON of a recording, at most, unless the profile sets another bound: some 300,000 events.

The worker that profiles parses the recordings of all workers, which takes some ten times as much memory.
"""

MIN_BYTES = 1 << 12
"""The least bound of a recording, in bytes."""

MOST_BYTES = 1 << 40
"""The greatest bound of a recording, in bytes."""

MAX_CALLS = 1 << 20
"""Calls, and runs of functions, that a worker records at most; it leaves out those that come later."""


SETTINGS = ("record_shapes", "profile_memory", "with_stack")
"""The options of torch's profiler that a profile of all workers has; all are off by default."""

MAX_ID_CHARACTERS = 64


def read_profile_id(value: object) -> str:
    """Returns the id of a profile that another worker has sent. Raises ValueError if it is none."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS:
        raise ValueError("malformed message: it has no id of a profile")
    return value


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What a worker is asked to record.

    profile: the id of the profile; the worker that profiles has given it to no other one.
    settings: those of SETTINGS that are on.
    max_bytes: bytes of the JSON of the recording, at most.
    """

    profile: str
    settings: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES

    def encode(self) -> str:
        """Returns the request as JSON: a text is all that has to be unpickled."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(value: object) -> "ProfileRequest":
        """Returns the request that another worker has encoded. Raises ValueError if it is malformed."""
        fields: Any = json.loads(value) if isinstance(value, str) else None
        if not isinstance(fields, dict) or fields.keys() != ProfileRequest.__dataclass_fields__.keys():
            raise ValueError("malformed message: it is no beginning of a profile")
        settings, max_bytes = fields["settings"], fields["max_bytes"]
        if not isinstance(settings, list) or not all(each in SETTINGS for each in settings):
            raise ValueError("malformed message: a profile has no such settings")
        if type(max_bytes) is not int or not MIN_BYTES <= max_bytes <= MOST_BYTES:
            raise ValueError(f"malformed message: a recording has {MIN_BYTES} to {MOST_BYTES} bytes")
        profile = read_profile_id(fields["profile"])
        return ProfileRequest(profile=profile, settings=tuple(settings), max_bytes=max_bytes)


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
    left_out: int = 0
    """How many events, calls and runs are left out, because the recording would be too large."""
    complete_until_ns: int = 0
    """When the first of them began, if any are left out; nanoseconds since 1970."""
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def leave_out(self, time_ns: int, count: int = 1) -> None:
        """Counts what is left out. Args: time_ns: when the first of it began. count: how much there is."""
        self.complete_until_ns = min(self.complete_until_ns, time_ns) if self.left_out else time_ns
        self.left_out += count


LISTS = ("events", "calls", "runs")
COUNTS = ("process", "base_ns", "left_out", "complete_until_ns")

MAX_NS = 1 << 63


def encode(recording: Recording, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns a recording as bytes. If its JSON has too many, what began last is left out, and counted in it."""
    kept: dict[str, list[str]] = {name: [] for name in LISTS}
    nbytes = MIN_BYTES // 2  # for the other fields
    as_json = json.JSONEncoder(separators=(",", ":")).encode
    timed = sorted(_timed(recording), key=lambda timed: timed[0])
    for number, (time_ns, name, item) in enumerate(timed):
        text = as_json(item)
        nbytes += len(text) + 1
        if nbytes > max_bytes:
            recording.leave_out(max(int(time_ns), 0), len(timed) - number)
            break
        kept[name].append(text)
    parts = [f'"{name}":{getattr(recording, name)}' for name in COUNTS]
    parts += [f'"{name}":[{",".join(texts)}]' for name, texts in kept.items()]
    return zlib.compress(f"{{{','.join(parts)}}}".encode(), 1)


def _timed(recording: Recording) -> Iterator[tuple[float, str, object]]:
    """Yields what is in the lists of a recording, with its time in nanoseconds, and the name of the list."""
    for event in recording.events:
        # The names of processes and threads are not left out.
        yield recording.base_ns + event["ts"] * 1e3 if event["ph"] != "M" else 0, "events", event
    for call in recording.calls:
        yield call.begun_ns, "calls", call
    for run in recording.runs:
        yield run.begun_ns, "runs", run


def decode(data: object, max_bytes: int = MAX_BYTES) -> Recording:
    """Returns the recording that another worker has encoded. Events that are malformed are left out.

    Raises ValueError if the data are no recording, or one whose JSON is too large.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"malformed recording: it is of type {type(data).__name__}")
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(data, max_bytes)
        # Without NaN and infinity, which are no JSON: the merged trace could not be read.
        text = b"{}" if inflater.unconsumed_tail else text
        fields = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except (zlib.error, RecursionError, ValueError) as error:
        raise ValueError(f"malformed recording: {printable(error)}") from None
    if inflater.unconsumed_tail:
        raise ValueError(f"malformed recording: it has more than {max_bytes} bytes")
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), list) for name in LISTS):
        raise ValueError("malformed recording: it has no lists of events, calls and runs")
    if not _are_counts([fields.get(name) for name in COUNTS]):
        raise ValueError("malformed recording: it has no process id and no times")
    return Recording(
        **{name: fields[name] for name in COUNTS},
        events=[each for each in fields["events"] if _is_event(each)],
        calls=[Call(*_shown(each)) for each in fields["calls"] if _is_row(each, 5)],
        runs=[Run(*_shown(each)) for each in fields["runs"] if _is_row(each, 6)],
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
