"""One Chrome trace of all workers: what is in it, and that its times fit together."""

import json

import gradwire
import pytest
import torch
from gradwire import rpc
from gradwire.errors import RpcError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.tracing.group_profile import GroupProfile

from tests.remote_functions import set_event, wait_for, wait_until


def multiply_on(worker, *others):
    """Multiplies here, and has the next worker do so."""
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if worker is not None:
        rpc.rpc_sync(worker, multiply_on, (*others, None) if others else (None,))
    return product


def profile_calls(path):
    with gradwire.profile(path) as found:
        rpc.rpc_sync("worker1", multiply_on, ("worker2",))
        first, second = (rpc.rpc_async("worker1", multiply_on, (None,)) for _ in range(2))
        first.wait()
        second.wait()
    return found


def read(path):
    trace = json.loads(path.read_text())
    names = {each["pid"]: each["args"]["name"] for each in events_of(trace, name="process_name")}
    return trace, names


def events_of(trace, **fields):
    return [each for each in trace["traceEvents"] if all(each.get(key) == value for key, value in fields.items())]


def is_inside(inner, outer, tolerance_us):
    return (
        outer["ts"] - tolerance_us <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + tolerance_us
    )


def test_one_file_has_all_workers(workers, tmp_path):
    a, *_ = workers.rpc(3)
    path = tmp_path / "trace.json"
    found = a.run(profile_calls, path)
    assert found.path == path
    assert found.missing == {}
    assert set(found.clock_errors) == {"worker0", "worker1", "worker2"}
    trace, names = read(path)
    assert set(names.values()) == {"worker0", "worker1", "worker2"}
    products = [names[each["pid"]] for each in events_of(trace, name="aten::mm")]
    assert sorted(products) == ["worker1"] * 3 + ["worker2"]
    tolerance_us = sum(found.clock_errors.values()) * 1e6 + 1
    calls = events_of(trace, cat="rpc_call")
    runs = {(each["args"]["caller"], each["args"]["id"]): each for each in events_of(trace, cat="rpc_run")}
    assert len(calls) == len(runs) == 4
    process_ids = {name: number for number, name in enumerate(sorted(names.values()))}
    for call in calls:
        run = runs[process_ids[names[call["pid"]]], call["args"]["id"]]
        assert call["name"] == run["name"] == f"{__name__}.multiply_on"
        assert is_inside(run, call, tolerance_us)
    beginnings = {each["id"]: each for each in events_of(trace, cat="rpc", ph="s")}
    ends = {each["id"]: each for each in events_of(trace, cat="rpc", ph="f")}
    assert set(beginnings) == set(ends)
    assert len(ends) == 4
    for identifier, end in ends.items():
        assert end["ts"] >= beginnings[identifier]["ts"] - tolerance_us
    for run in runs.values():
        products = events_of(trace, name="aten::mm", pid=run["pid"], tid=run["tid"])
        assert any(is_inside(each, run, 1) for each in products)


def test_workers_can_be_chosen_and_profiled_again(workers, tmp_path):
    a, *_ = workers.rpc(2)

    def profile_some(path):
        with gradwire.profile(path, ["worker1"], record_shapes=True):
            rpc.rpc_sync("worker1", multiply_on, (None,))
        with gradwire.profile(path, ["worker1"], record_shapes=True):
            rpc.rpc_sync("worker1", multiply_on, (None,))

    a.run(profile_some, tmp_path / "trace.json")
    trace, names = read(tmp_path / "trace.json")
    assert set(names.values()) == {"worker1"}
    (product,) = events_of(trace, name="aten::mm")
    assert product["args"]["Input Dims"] == [[8, 8], [8, 8]]
    assert not events_of(trace, cat="rpc", ph="s")  # the caller was not profiled, so there is no arrow
    assert not events_of(trace, cat="rpc", ph="f")


def test_the_trace_is_written_when_the_block_raises(workers, tmp_path):
    (worker,) = workers.rpc(1)

    def fail_inside(path):
        with pytest.raises(ValueError, match="as asked"), gradwire.profile(path):
            rpc.rpc_sync("worker0", multiply_on, (None,))
            raise ValueError("as asked")
        return current_agent().extension(GroupProfile).is_on

    assert not worker.run(fail_inside, tmp_path / "trace.json")
    assert len(events_of(read(tmp_path / "trace.json")[0], cat="rpc_run")) == 1
    with pytest.raises(FileNotFoundError, match="make it first"):
        worker.run(fail_inside, tmp_path / "none" / "trace.json")


def test_a_worker_is_profiled_once_at_a_time(workers, tmp_path):
    a, b = workers.rpc(2)

    def profile_until(path, name):
        with gradwire.profile(path, ["worker1"]):
            rpc.rpc_sync("worker0", set_event, ("begun",))
            wait_for(name)

    pending = a.start(profile_until, tmp_path / "first.json", "go")
    b.run(rpc.rpc_sync, "worker0", wait_for, ("begun",))

    def profile_both():
        with (
            pytest.raises(RpcError, match="'worker1' is being profiled already, by 'worker0'"),
            gradwire.profile(tmp_path / "second.json"),
        ):
            raise AssertionError("it has begun")

    b.run(profile_both)
    b.run(rpc.rpc_sync, "worker0", set_event, ("go",))
    pending.result()
    assert not (tmp_path / "second.json").exists()
    a.run(profile_calls_of, tmp_path / "third.json", "worker0")  # it has not been left on


def profile_calls_of(path, *names):
    with gradwire.profile(path, names) as found:
        pass
    return found


def test_a_trace_says_what_it_lacks(workers, tmp_path):
    (worker,) = workers.rpc(1)

    def profile_too_much(path):
        with gradwire.profile(path, max_bytes=1 << 14) as found:
            for _ in range(100):
                rpc.rpc_sync("worker0", multiply_on, (None,))
        with pytest.raises(ValueError, match="max_bytes is 1"), gradwire.profile(path, max_bytes=1):
            raise AssertionError("it has begun")
        return found

    found = worker.run(profile_too_much, tmp_path / "trace.json")
    trace, _ = read(tmp_path / "trace.json")
    (said,) = events_of(trace, ph="i", cat="gradwire")
    assert found.left_out == {"worker0": said["args"]["left_out"]}
    assert found.missing == {}
    assert 0 < len(events_of(trace, cat="rpc_call")) < 100
    assert "left out" in said["name"]


def test_a_worker_that_dies_is_left_out(workers, tmp_path):
    a, b, c = workers.rpc(3)

    def profile_until(path):
        with gradwire.profile(path, ["worker0", "worker1"]) as found:
            rpc.rpc_sync("worker0", set_event, ("begun",))
            wait_for("go")
        return found

    pending = a.start(profile_until, tmp_path / "trace.json")
    b.run(rpc.rpc_sync, "worker0", wait_for, ("begun",))
    b.kill()
    c.run(rpc.rpc_sync, "worker0", set_event, ("go",))
    found = pending.result()
    assert set(found.missing) == {"worker1"}
    assert set(read(tmp_path / "trace.json")[1].values()) == {"worker0"}


def test_who_dies_does_not_leave_the_others_recording(workers, tmp_path):
    a, b = workers.rpc(2)

    def profile_for_ever(path):
        with gradwire.profile(path, ["worker1"]):
            rpc.rpc_sync("worker1", set_event, ("begun",))
            wait_for("never")

    a.start(profile_for_ever, tmp_path / "trace.json")
    b.run(wait_for, "begun")
    assert b.run(is_recording)
    a.kill()
    wait_until(lambda: not b.run(is_recording))


def is_recording():
    return current_agent().extension(GroupProfile).is_on
