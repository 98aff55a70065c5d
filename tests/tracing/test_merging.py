"""Clocks, recordings and their merging, without workers."""

import json
import zlib

import pytest
from gradwire.tracing.chrome_trace import (
    EXCHANGES,
    FIRST_ROW,
    PROCESSES_PER_WORKER,
    Clock,
    ClockReading,
    WorkerTrace,
    merge,
    read_clock,
)
from gradwire.tracing.recording import MIN_BYTES, Call, Recording, Run, decode, encode
from hypothesis import given
from hypothesis import strategies as st

SECOND = 1_000_000_000
SAME = Clock(ClockReading(0, 0, 0), ClockReading(SECOND, 0, 0))


class Clocks:
    """Two clocks; time passes only when a message travels."""

    def __init__(self, ahead_ns, trips):
        self.now_ns, self._ahead_ns, self._trips = 5 * SECOND, ahead_ns, iter(trips)

    def here(self):
        return self.now_ns

    def ask(self):
        there, back = next(self._trips)
        self.now_ns += there
        answer = self.now_ns + self._ahead_ns
        self.now_ns += back
        return answer


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 2), min_size=EXCHANGES, max_size=EXCHANGES),
)
def test_the_offset_is_within_its_error(ahead_ns, trips):
    clocks = Clocks(ahead_ns, trips)
    reading = read_clock(clocks.ask, clocks.here)
    assert abs(reading.offset_ns - ahead_ns) <= reading.error_ns
    assert reading.error_ns == min((sum(trip) + 1) // 2 for trip in trips)


@pytest.mark.parametrize("ahead_s", [-100, 0, 3])
@pytest.mark.parametrize("drift", [0.0, 1e-4, -1e-4])
def test_times_of_a_clock_that_drifts_come_back(ahead_s, drift):
    def there(here_ns):
        return here_ns + ahead_s * SECOND + round(drift * (here_ns - 50 * SECOND))

    first, last = 50 * SECOND, 60 * SECOND
    clock = Clock(ClockReading(first, there(first) - first, 7), ClockReading(last, there(last) - last, 9))
    assert clock.error_ns == 9
    for here_ns in (first, 53 * SECOND, last):
        assert abs(clock.to_local(there(here_ns)) - here_ns) < 1e-6 * SECOND


def test_clocks_are_aligned_and_arrows_connect():
    ahead = 7 * SECOND
    caller = Recording(100, calls=[Call(1, 5, "work", 10 * SECOND, 12 * SECOND)])
    callee = Recording(
        200,
        base_ns=ahead,
        events=[
            {"ph": "M", "name": "process_name", "pid": 200, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::mm", "pid": 200, "tid": 201, "ts": 10.7e6, "dur": 5.0},
            {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 10.8e6, "dur": 5.0},
            {"ph": "M", "name": "process_labels", "pid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
            {"ph": "s", "name": "ac2g", "pid": 200, "tid": 201, "ts": 10.7e6, "id": 3},
        ],
        runs=[Run(4, 1, "work", 201, 10 * SECOND + ahead + SECOND // 2, 11 * SECOND + ahead)],
    )
    shifted = Clock(ClockReading(0, ahead, 1000), ClockReading(SECOND, ahead, 2000))
    trace = merge([WorkerTrace("a", 4, caller, SAME), WorkerTrace("b", 5, callee, shifted)])
    assert trace["workers"]["b"] == {"clock_offset_us": 7e6, "clock_error_us": 2.0, "left_out": 0}
    events = {(each["name"], each["ph"]): each for each in trace["traceEvents"]}
    assert (events["call", "s"]["ts"], events["call", "s"]["tid"]) == (0.0, FIRST_ROW)
    assert (events["call", "f"]["ts"], events["call", "f"]["pid"]) == (0.5e6, PROCESSES_PER_WORKER)
    assert events["call", "s"]["id"] == events["call", "f"]["id"]
    assert events["aten::mm", "X"]["ts"] == pytest.approx(0.7e6)
    assert events["ac2g", "s"]["id"] != 3
    names = {each["pid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"}
    assert names == {0: "a", PROCESSES_PER_WORKER: "b", PROCESSES_PER_WORKER + 1: "b GPU 0"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_calls_in_one_row_do_not_overlap(times):
    calls = [Call(number, 1, "f", begun, begun + length) for number, (begun, length) in enumerate(times)]
    trace = merge([WorkerTrace("a", 0, Recording(1, calls=calls), SAME)])
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(slices) == len(calls)
    ends = {}
    for each in sorted(slices, key=lambda each: each["ts"]):
        assert each["ts"] >= ends.get(each["tid"], 0.0) - 1e-9
        ends[each["tid"]] = each["ts"] + each["dur"]


def test_a_recording_travels():
    event = {"ph": "X", "pid": 3, "tid": 4, "ts": 0.5, "name": "f"}
    recording = Recording(
        3, 17, 2, 18, events=[event], calls=[Call(1, 2, "f", 3, 4)], runs=[Run(1, 2, "f", 3, 4, 5)]
    )
    assert decode(encode(recording)) == recording


def test_what_began_last_is_left_out_of_a_recording_that_is_too_large():
    event = {"ph": "X", "pid": 3, "tid": 4, "dur": 1.0, "name": "f" * 100}
    name = {"ph": "M", "name": "thread_name", "pid": 3, "ts": 0, "args": {"name": "main"}}
    times = [*range(0, 100, 2), *range(1, 100, 2)]
    recording = Recording(
        3,
        base_ns=SECOND,
        events=[{**event, "ts": 1.0 * time} for time in times] + [name],
        calls=[Call(time, 1, "f", SECOND + time * 1000, SECOND + 200_000) for time in range(100)],
    )
    data = encode(recording, MIN_BYTES)
    assert len(zlib.decompress(data)) <= MIN_BYTES
    found = decode(data, MIN_BYTES)
    kept = len(found.events) + len(found.calls)
    assert 0 < kept < 201
    assert found.left_out == 201 - kept
    assert name in found.events
    times_ns = [SECOND + each["ts"] * 1000 for each in found.events if each["ph"] != "M"]
    times_ns += [call.begun_ns for call in found.calls]
    assert max(times_ns) <= found.complete_until_ns <= SECOND + 99_000
    clock = Clock(ClockReading(0, 0, 0), ClockReading(2 * SECOND, 0, 0))
    trace = merge([WorkerTrace("a", 0, found, clock)])
    (said,) = [each for each in trace["traceEvents"] if each["ph"] == "i"]
    assert said["args"] == {"left_out": found.left_out} == {"left_out": trace["workers"]["a"]["left_out"]}
    assert max(each["ts"] for each in trace["traceEvents"]) == said["ts"]


def test_a_recording_beyond_what_was_asked_for_is_refused():
    recording = Recording(3, calls=[Call(each, 1, "f", each, each) for each in range(1000)])
    with pytest.raises(ValueError, match=f"more than {MIN_BYTES} bytes"):
        decode(encode(recording), MIN_BYTES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["ph", "ts", "pid", "x"]), inner),
    max_leaves=12,
)
ROWS = st.lists(st.lists(st.integers(-1, 9) | st.text(max_size=3), min_size=4, max_size=7), max_size=3)
FIELDS = st.fixed_dictionaries(
    {
        "events": JSON | st.lists(JSON),
        "calls": ROWS | JSON,
        "runs": ROWS,
        "process": st.integers(-1, 3),
        "base_ns": JSON,
    }
)


@given(st.binary(max_size=50) | JSON.map(json.dumps).map(str.encode) | FIELDS.map(json.dumps).map(str.encode))
def test_what_a_worker_sends_is_merged_or_refused(text):
    for data in (text, zlib.compress(text)):
        try:
            recording = decode(data)
        except ValueError:
            continue
        json.dumps(merge([WorkerTrace("a", 0, recording, SAME)]), allow_nan=False)


@pytest.mark.parametrize(
    "data", [None, b"", b"{}", zlib.compress(b"[" * 100_000), zlib.compress(b'{"events": 1}')]
)
def test_what_is_no_recording_is_refused(data):
    with pytest.raises(ValueError, match="malformed recording"):
        decode(data)
