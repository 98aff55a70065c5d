"""The last minute: of one worker, and of all together, whatever others say of theirs."""

import threading
import time

import pytest
from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view.statistics import CallStatistics
from gradwire.view.timeline import COUNTERS, SECONDS, Timeline, merged_timeline

from tests.remote_functions import add, wait_until

NOW = 1_000_000.5


def worker(name="worker0", *, skew=0.0, events=(), **columns):
    """Returns what the state of a job has of a worker whose clock is ahead by `skew`."""
    columns = {"ended": [], "seconds": [], **{each: [0] * len(columns["ended"]) for each in COUNTERS}, **columns}
    columns["ended"] = [each + skew for each in columns["ended"]]
    events = [{"time": time + skew, "event": event, "worker": who} for time, event, who in events]
    return {"name": name, "state": {"time": NOW + skew, "timeline": columns, "events": events}}


@pytest.mark.parametrize("skew", [0.0, 3600.0, -3600.0])
def test_what_workers_count_is_added_up_by_their_age(skew):
    a = worker(ended=[NOW - 1.5, NOW - 0.5], seconds=[1.0, 1.0], calls_sent=[10, 20], bytes_sent=[0, 1 << 20])
    b = worker("worker1", skew=skew, ended=[NOW - 0.5, NOW], seconds=[1.0, 0.5], calls_sent=[5, 1])
    found = merged_timeline([a, b, {"name": "worker2", "state": None}], NOW)
    assert found["began"] == 1_000_000 - SECONDS + 1
    assert found["calls"][-4:] == [0, 10, 25, 1]
    assert found["bytes"][-4:] == [0, 0, 1 << 20, 0]
    assert {len(found[name]) for name in ("calls", "failed", "bytes", "lost", "returned")} == {SECONDS}


def test_a_sample_is_spread_over_the_seconds_that_it_covers():
    found = merged_timeline([worker(ended=[NOW - 0.5], seconds=[4.0], calls_sent=[40])], NOW)
    assert found["calls"][-6:] == [0, 10, 10, 10, 10, 0]
    found = merged_timeline([worker(ended=[NOW - 0.5], seconds=[120.0], calls_sent=[120])], NOW)
    assert found["calls"] == [1] * (SECONDS - 1) + [0]


def test_a_loss_counts_once_for_all_who_notice_it():
    seen = [(NOW - 5, "lost", "worker2"), (NOW - 3, "suspect", "worker3"), (NOW - 2, "back", "worker3")]
    later = [(NOW - 4, "lost", "worker2"), (NOW - 1, "back", "worker3"), (NOW - 1, "returned", "worker2")]
    members = [worker(ended=[], events=seen), worker("worker1", ended=[], skew=99.0, events=later)]
    found = merged_timeline(members, NOW)
    assert found["lost"][-7:] == [0, 1, 0, 0, 0, 0, 0]
    assert found["returned"][-4:] == [0, 1, 1, 0]


def test_a_worker_keeps_a_minute(monkeypatch):
    monkeypatch.setattr("gradwire.view.timeline.SECONDS", 3)
    sampled = threading.Semaphore(0)
    count = 0

    def read():
        nonlocal count
        count += 1
        sampled.release()
        return (count,) * len(COUNTERS)

    monkeypatch.setattr("gradwire.view.timeline._pause", lambda: 0.0)
    timeline = Timeline(read, "gradwire-test-clock")
    for _ in range(20):
        assert sampled.acquire(timeout=60)
    timeline.close()
    found = timeline.as_json()
    assert {len(column) for column in found.values()} == {4}  # and what has been since
    assert found["calls_sent"] == [1, 1, 1, 1]
    assert not any(thread.name == "gradwire-test-clock" for thread in threading.enumerate())


def test_the_calls_of_a_worker_are_in_its_minute(workers):
    a, _ = workers.rpc(2, view=rpc.View())

    def call():
        for number in range(9):
            rpc.rpc_sync("worker1", add, (number, 1))
        timeline = current_agent().extension(CallStatistics).timeline
        wait_until(lambda: sum(timeline()["calls_sent"]) == 9)
        return timeline(), rpc.debug_info()["bytes_sent"], time.time()

    found, nbytes, now = a.run(call)
    assert 0 < sum(found["bytes_sent"]) <= nbytes
    assert all(now - 61 < each <= now + 0.001 for each in found["ended"])  # which are rounded
