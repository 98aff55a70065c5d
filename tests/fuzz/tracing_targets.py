"""Parsers of tracing: the place of a call in a trace, and what workers record in a profile of all of them."""

import json
import zlib

from google.protobuf.message import DecodeError
from gradwire.proto.v1 import agent_pb2
from gradwire.tracing.call_spans import MAX_FIELDS, read_fields
from gradwire.tracing.chrome_trace import Clock, ClockReading, WorkerTrace, merge
from gradwire.tracing.recording import Call, Recording, Run, decode, encode
from hypothesis import strategies as st

from tests.fuzz.target import Target

__all__ = ["TRACING_TARGETS"]

MIB = 1 << 20
CLOCK = Clock(ClockReading(0, 5, 1), ClockReading(1000, 7, 2))

FIELDS = st.lists(
    st.builds(
        agent_pb2.TraceField,
        name=st.sampled_from(["traceparent", "tracestate", "baggage"]),
        value=st.text(max_size=80),
    ),
    max_size=MAX_FIELDS + 1,
).map(lambda fields: agent_pb2.Envelope(id=1, trace=fields).SerializeToString())


def read_trace_fields(data: bytes) -> None:
    """Reads the place of a call in a trace."""
    try:
        envelope = agent_pb2.Envelope.FromString(data)
    except DecodeError:
        return
    assert len(read_fields(envelope.trace)) <= MAX_FIELDS


NUMBERS = st.integers(0, 1 << 40)
RECORDINGS = st.builds(
    Recording,
    process=NUMBERS,
    base_ns=NUMBERS,
    events=st.lists(
        st.fixed_dictionaries(
            {"ph": st.sampled_from(["X", "M", "s"]), "ts": st.floats(), "pid": NUMBERS},
            optional={"name": st.text(max_size=5), "dur": st.floats(), "args": st.just({"labels": "GPU 0"})},
        ),
        max_size=4,
    ),
    calls=st.lists(st.builds(Call, NUMBERS, NUMBERS, st.text(max_size=5), NUMBERS, NUMBERS), max_size=3),
    runs=st.lists(st.builds(Run, NUMBERS, NUMBERS, st.text(max_size=5), NUMBERS, NUMBERS, NUMBERS), max_size=3),
).map(encode)


def read_recording(data: bytes) -> None:
    """Reads a recording, also one whose compressed bytes are these, and merges it."""
    for each in (data, zlib.compress(data)):
        try:
            recording = decode(each)
        except ValueError:
            continue
        json.dumps(merge([WorkerTrace("a", 0, recording, CLOCK)]))


TRACING_TARGETS = (
    Target(name="trace-fields", parse=read_trace_fields, inputs=FIELDS, max_bytes=2 * MIB),
    Target(name="recordings", parse=read_recording, inputs=RECORDINGS, max_bytes=16 * MIB),
)
