"""The state of a worker and of a job, and who waits for whom in it."""

import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gradwire import autograd, rpc
from gradwire.c10d import TCPStore
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view.overview import Viewing, overview_of, stacks_of
from gradwire.view.waits import STUCK_AFTER_S, Waits

from tests.remote_functions import add, identity, set_event, wait_for, wait_until
from tests.rpc.membership.test_rejoining import join
from tests.stopped import has_stopped

TIMEOUT_S = 20.0


def job(timeout=TIMEOUT_S):
    return json.loads(json.dumps(overview_of(current_agent(), timeout)))


def states(found):
    return {each["name"]: each["state"] for each in found["workers"]}


def test_who_leaves_on_purpose_is_not_lost(workers, tmp_path):
    a, b = workers(2)
    for name, each in ("a", a), ("b", b):
        each.run(join_dynamic_group, name, f"file://{tmp_path}/dynamic")
    a.run(rpc.rpc_sync, "b", os.getpid)
    b.run(rpc.shutdown)

    def see_it_leave():
        wait_until(lambda: "left" in [each["event"] for each in states(job())["a"]["events"]])
        return states(job())["a"], rpc.debug_info()["lost_workers"]

    state, ended = a.run(see_it_leave)
    assert ended == {"b": "it has shut down"}
    assert state["lost"] == {}


def join_dynamic_group(name, url):
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(init_method=url, view=rpc.View()))


def test_a_state_has_the_counts_of_the_worker(workers):
    a, _ = workers.rpc(2, view=rpc.View())

    def look():
        reference = rpc.remote("worker1", identity, (torch.ones(3),))
        reference.to_here()
        with autograd.context() as context:
            rpc.rpc_sync("worker1", add, (torch.ones(2, requires_grad=True), 1))
            found = states(job())
        return found, context, dict(rpc.debug_info()), rpc.rpc_sync("worker1", os.getpid)

    found, context, info, pid = a.run(look)
    here, there = found["worker0"], found["worker1"]
    assert there["worker"]["pid"] == pid
    assert here["links"]["worker1"]["state"] == "connected"
    assert here["links"]["worker1"]["transport"] == info["transports"]["worker1"]
    assert here["references"]["held_of"] == {"worker1": 1}
    assert there["references"]["held_by"] == {"worker0": 1}
    (here_context,) = here["contexts"]["oldest"]
    (there_context,) = there["contexts"]["oldest"]
    assert here_context["id"] == there_context["id"] == context
    assert there_context["creator"] == "worker0"
    sent = {each["function"]: each["count"] for each in here["calls"]["sent"]}
    served = {each["function"]: each["count"] for each in there["calls"]["served"]}
    for name in (f"{add.__module__}.add", "to_here"):  # the answer to `remote` may wait for another message
        assert sent[name] == served[name] == 1
    assert here["traffic"]["messages_sent"] <= info["messages_sent"]


@pytest.mark.parametrize(
    ("transports", "channel"),
    [(("unix", "tcp", "grpc"), "segment"), (("tcp", "grpc"), "bulk"), (("grpc",), "chunked")],
    ids=["unix", "tcp", "grpc"],
)
def test_bytes_are_counted_by_link_and_channel(workers, transports, channel):
    a, b = workers.rpc(2, transports=transports)

    def call():
        rpc.rpc_sync("worker1", identity, (1,))  # connects them, as shared memory needs
        for _ in range(3):
            rpc.rpc_sync("worker1", torch.sum, (torch.ones(1 << 20),))
            wait_until(lambda: rpc.debug_info()["channels"]["worker1"] == channel)  # after the first payload
        return rpc.debug_info()

    here, there = a.run(call), b.run(rpc.debug_info)
    sent, received = here["traffic"]["worker1"]["bytes_sent"], there["traffic"]["worker0"]["bytes_received"]
    # Messages may be sent between the totals and these counts; the first payloads may go by chunks.
    assert sum(sent.values()) >= here["bytes_sent"]
    assert sum(received.values()) >= there["bytes_received"]
    assert sent.pop("inline") > 0
    assert received.pop("inline") > 0
    assert sent == received
    assert sum(sent.values()) == 3 << 22
    assert sent[channel] > 0
    assert here["transports"]["worker1"] == transports[0]


def test_a_worker_that_is_not_in_a_barrier_is_named(workers):
    a, observer, c = workers.rpc(3)
    in_barrier = a.start(rpc.barrier, ["worker0", "worker2"])
    waiting = c.start(wait_for, "go on")

    def look():
        wait_until(lambda: job()["waits"])
        wait_until(lambda: "wait_for" in functions_of_main_thread("worker2"))
        found = job()
        pid = states(found)["worker2"]["worker"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: has_stopped(pid))
            stopped = job_without("worker2")
        finally:
            os.kill(pid, signal.SIGCONT)
        rpc.rpc_sync("worker2", set_event, ("go on",))
        return found, stopped

    found, stopped = observer.run(look)
    for each in found, stopped:
        (wait,) = each["waits"]
        assert (wait["operation"], wait["entered"], wait["missing"]) == ("barrier", ["worker0"], ["worker2"])
        assert "workers.py" in wait["call_site"]  # which runs `rpc.barrier` for the test
    assert [found["waits"][0]["stuck"], stopped["waits"][0]["stuck"]] == [False, True]
    assert found["waits"][0]["missing_at"]["worker2"].endswith(" in wait_for")
    assert stopped["waits"][0]["missing_at"] == {}
    assert states(stopped)["worker2"] is None
    assert "worker2" in stopped["workers"][2]["error"]
    waiting.result()
    c.run(rpc.barrier, ["worker0", "worker2"])
    in_barrier.result()
    assert observer.run(job)["waits"] == []


def test_a_worker_that_serves_in_shutdown_is_not_stuck(workers):
    observer, server, client = workers.rpc(3)
    serving = server.start(rpc.shutdown)

    def look():
        wait_until(lambda: job()["waits"])
        found = job()
        os.kill(client_pid, signal.SIGSTOP)
        try:
            wait_until(lambda: has_stopped(client_pid))
            return found, job_without("worker2")
        finally:
            os.kill(client_pid, signal.SIGCONT)

    client_pid = client.pid
    found, stopped = observer.run(look)
    for each in found, stopped:
        (wait,) = each["waits"]
        assert (wait["operation"], wait["entered"]) == ("shutdown", ["worker1"])
        assert wait["missing"] == ["worker0", "worker2"]
    assert [found["waits"][0]["stuck"], stopped["waits"][0]["stuck"]] == [False, True]
    for each in [observer.start(rpc.shutdown), client.start(rpc.shutdown), serving]:
        each.result()


def test_a_collective_that_lasts_is_stuck(workers):
    """A wait says so after ten seconds; for how long it has lasted depends on the time that is given."""
    a, b = workers.rpc(2)
    in_barrier = a.start(rpc.barrier)

    def look():
        wait_until(lambda: job()["waits"])
        members = job()["workers"]
        now = time.time()
        return [Waits().of(members, now + later)[0]["stuck"] for later in (0.0, STUCK_AFTER_S)]

    assert b.run(look) == [False, True]
    b.run(rpc.barrier)
    in_barrier.result()


def job_without(name):
    """Returns the state of the job once all others but the worker with this name have answered in time."""
    found = []

    def others_have_answered():
        found[:] = [job(timeout=1.0)]
        return [each for each, state in states(found[0]).items() if state is None] == [name]

    wait_until(others_have_answered)
    return found[0]


def functions_of_main_thread(name):
    (main,) = [each for each in stacks_of(current_agent(), name) if each["is_main"]]
    return [frame["function"] for frame in main["frames"]]


def test_a_rank_that_is_not_in_a_collective_is_named(workers, tmp_path):
    a, b, observer = workers.rpc(3)

    def form(rank):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gradwire_shm", rank=rank, world_size=2, store=store)
        dist.all_reduce(torch.ones(1))

    for each in [a.start(form, 0), b.start(form, 1)]:
        each.result()
    reducing = a.start(lambda: dist.all_reduce(torch.ones(1)))

    def look():
        wait_until(lambda: job()["waits"])
        return job()["waits"]

    (wait,) = observer.run(look)
    assert (wait["kind"], wait["operation"], wait["number"]) == ("process_group", "all_reduce", 2)
    assert (wait["entered"], wait["missing"]) == (["worker0"], ["worker1"])
    assert "test_snapshot" in wait["call_site"]
    b.run(lambda: dist.all_reduce(torch.ones(1)))
    reducing.result()
    for each in [a.start(dist.destroy_process_group), b.start(dist.destroy_process_group)]:
        each.result()


def test_a_lost_worker_is_an_event(workers):
    a, b = workers.rpc(2)
    a.run(rpc.rpc_sync, "worker1", os.getpid)
    b.kill()

    def look():
        wait_until(lambda: current_agent().extension(Viewing).snapshot()["events"])
        found = job()
        return found["workers"][1], states(found)["worker0"]

    lost, state = a.run(look)
    assert lost["state"] is None
    assert "worker1" in lost["error"]
    (event,) = [each for each in state["events"] if each["event"] == "lost"]
    assert (event["worker"], list(state["lost"])) == ("worker1", ["worker1"])


def test_a_worker_that_is_started_again_has_returned(workers):
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        a, b = workers(2)
        for each in [worker.start(join, rank, store.port, size=2) for rank, worker in enumerate((a, b))]:
            each.result()
        a.run(rpc.rpc_sync, "w1", os.getpid)
        b.kill()
        a.run(wait_for_event, "lost")
        (again,) = workers(1)
        again.run(join, 1, store.port, size=2)
        a.run(wait_for_event, "returned")
        timeline = a.run(job)["timeline"]
        assert (sum(timeline["lost"]), sum(timeline["returned"])) == (1, 1)
        assert a.run(rpc.rpc_sync, "w1", os.getpid) == again.pid


def wait_for_event(name):
    viewing = current_agent().extension(Viewing)
    wait_until(lambda: name in [each["event"] for each in viewing.snapshot()["events"]])
