"""Timeouts expire in the order of their times, only those of pending calls, and keep calls from beginning."""

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gradwire import rpc
from gradwire.errors import Outcome, RpcTimeoutError
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.execution import executor, timers
from gradwire.rpc.execution.timers import MAX_SETTLED_ENTRIES, Deadlines
from gradwire.rpc.peers.peer import Peer
from gradwire.rpc.requests.call import State
from gradwire.rpc.requests.server import ServedCall, Server

from tests import remote_functions
from tests.remote_functions import add, assert_clean, keep, set_event, wait_for, wait_until
from tests.stopped import stopped
from tests.workers import Worker


@contextmanager
def deadlines(live: set[int]) -> Iterator[tuple[Deadlines, "queue.SimpleQueue[int]"]]:
    expired: queue.SimpleQueue[int] = queue.SimpleQueue()
    started = Deadlines(expired.put, live.__contains__, "gradwire-deadlines-test")
    try:
        yield started, expired
    finally:
        started.close()


class Clock:
    """Stands still until it is started, however long that takes."""

    def __init__(self) -> None:
        self.monotonic = lambda: 0.0

    def start(self) -> None:
        began = time.monotonic()
        self.monotonic = lambda: time.monotonic() - began


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timers, "time", made)
    return made


def test_calls_expire_in_the_order_of_their_times(clock):
    with deadlines({1, 2, 3}) as (timeouts, expired):
        for identifier, seconds in ((3, 0.03), (1, 0.01), (2, 0.02)):
            timeouts.add(identifier, seconds)
        clock.start()
        assert [expired.get(timeout=20) for _ in range(3)] == [1, 2, 3]


def test_settled_calls_do_not_expire(clock):
    live = {1, 2, 3}
    with deadlines(live) as (timeouts, expired):
        for identifier in live:
            timeouts.add(identifier, 0.05 * identifier)
        live -= {2}
        clock.start()
        assert [expired.get(timeout=20) for _ in range(2)] == [1, 3]
        assert expired.empty()


def test_entries_of_settled_calls_are_removed():
    live = set(range(100))
    with deadlines(live) as (timeouts, expired):
        for identifier in live - {0}:
            timeouts.add(identifier, 3600 + identifier)
        live.intersection_update({0})
        timeouts.add(0, 0.01)
        assert expired.get(timeout=20) == 0
        wait_until(lambda: not timeouts._entries)


def test_nothing_is_kept_of_many_different_timeouts():
    live: set[int] = set()
    with deadlines(live) as (timeouts, _):
        for identifier in range(3 * MAX_SETTLED_ENTRIES):
            timeouts.add(identifier, 1000 + identifier / 7)
        assert len(timeouts._entries) <= MAX_SETTLED_ENTRIES + 1


def never_add_threads() -> None:
    """Has calls wait for a thread of this worker, however long that takes."""
    executor.STALL_TIMEOUT_S = executor.MAX_STALL_TIMEOUT_S = 3600.0


def start_waiting() -> None:
    remote_functions.kept.append(rpc.rpc_async("worker1", wait_for, ("release",), timeout=0))


def wait_for_file(path: Path) -> None:
    wait_until(path.exists)


def waiting_requests() -> dict[tuple[int, int], ServedCall]:
    agent: Any = rpc.api.current_agent()
    return agent._server.waiting


def count_queued() -> int:
    return rpc.debug_info()["agent.num_pending_requests"]


def count_in_time() -> int:
    """Returns how many of the requests that wait may still begin."""
    return sum(call.deadline > time.monotonic() for call in waiting_requests().copy().values())


def group_with_one_thread(workers, count: int) -> list[Worker]:
    """Starts a group whose worker1 has one thread, which runs a call of worker0 until "release" is set."""
    started = workers(count)
    started[1].run(never_add_threads)
    workers.join_rpc(started, num_worker_threads=1)
    started[0].run(start_waiting)
    started[1].run(wait_until, lambda: rpc.debug_info()["agent.server_active_calls"] == 1)
    return started


def test_a_call_that_has_timed_out_does_not_begin(workers):
    a, b = group_with_one_thread(workers, 2)

    def call() -> None:
        late = rpc.rpc_async("worker1", keep, ("late",), timeout=0.2)
        reference = rpc.remote("worker1", keep, ("late, too",), timeout=0.2)
        in_time = rpc.rpc_async("worker1", keep, ("in time",), timeout=60)
        with pytest.raises(RpcTimeoutError, match="a call to worker 'worker1'"):
            late.wait()
        with pytest.raises(RpcTimeoutError):
            reference._get_future().wait()
        remote_functions.kept.append(in_time)

    a.run(call)
    b.run(wait_until, lambda: count_queued() >= 3 and count_in_time() == 1)  # it may have got them later
    b.run(set_event, "release")
    assert a.run(lambda: remote_functions.kept[1].wait()) == 1
    assert b.run(lambda: remote_functions.kept) == ["in time"]
    a.run(lambda: wait_until(lambda: not rpc.debug_info()["flow_control"]["worker1"]["calls_in_flight"]))
    a.run(assert_clean)
    b.run(assert_clean)


def test_the_caller_is_told_that_it_has_not_begun(workers):
    """Its own clock is behind here."""
    a, b = group_with_one_thread(workers, 2)

    def call() -> None:
        agent: Any = rpc.api.current_agent()
        agent._caller._deadlines.add = lambda *_: None
        remote_functions.kept.append(rpc.rpc_async("worker1", keep, ("late",), timeout=0.2))

    a.run(call)
    b.run(wait_until, lambda: count_queued() == 1)
    b.run(wait_until, lambda: time.monotonic() > max(call.deadline for call in waiting_requests().values()))
    b.run(set_event, "release")

    def check() -> None:
        with pytest.raises(RpcTimeoutError, match="before it began.*it has not run") as caught:
            remote_functions.kept[1].wait()
        assert caught.value.outcome is Outcome.NOT_SENT

    a.run(check)
    assert b.run(lambda: remote_functions.kept) == []


def test_calls_of_a_lost_worker_do_not_begin(workers):
    a, b, c = group_with_one_thread(workers, 3)

    def call_three_times() -> None:
        for index in range(3):
            remote_functions.kept.append(rpc.rpc_async("worker1", keep, (f"of the dead {index}",)))
        remote_functions.kept.append(rpc.remote("worker1", keep, ("its reference",)))

    c.run(call_three_times)
    b.run(wait_until, lambda: count_queued() == 4)
    c.kill()
    b.run(wait_until, lambda: rpc.debug_info()["lost_workers"] and not len(waiting_requests()))
    b.run(set_event, "release")
    assert a.run(rpc.rpc_sync, "worker1", keep, ("of the living",)) == 1
    assert b.run(lambda: remote_functions.kept) == ["of the living"]
    a.run(lambda: remote_functions.kept.clear())
    b.run(assert_clean)


def test_the_time_that_a_call_waits_for_capacity_counts(workers, tmp_path):
    a, b = workers.rpc(2, flow_control=rpc.FlowControlOptions(max_in_flight=1))

    def note_timeouts() -> None:
        announce = Server.arrive

        def note(self, source, envelope, **options):
            remote_functions.kept.append(envelope.timeout_ms)
            return announce(self, source, envelope, **options)

        Server.arrive = note

    def age_the_call_that_waits() -> None:
        agent: Any = rpc.api.current_agent()
        pending = agent._caller.in_flight
        wait_until(lambda: any(request.waits_since for request in list(pending.values())))
        (waiting,) = [request for request in pending.values() if request.state is State.QUEUED]
        waiting.waits_since -= 20  # as if it had begun to wait so long ago
        release.touch()

    def call() -> None:
        first = rpc.rpc_async("worker1", wait_for_file, (release,), timeout=0)
        threading.Thread(target=age_the_call_that_waits).start()
        assert rpc.rpc_sync("worker1", add, (1, 1), timeout=50) == 2
        first.wait()

    release = tmp_path / "release"
    b.run(note_timeouts)
    a.run(call)
    unlimited, limited = b.run(lambda: remote_functions.kept)
    assert unlimited == 0
    assert 1 <= limited <= 30_000


def test_calls_in_the_socket_of_a_stopped_worker_do_not_begin(workers):
    """They have timed out, and are called off, when it goes on."""
    a, b = group_with_one_thread(workers, 2)

    def never_expire() -> None:
        arrive = Server.arrive

        def arrive_for_ever(server: Server, source: Peer, envelope: agent_pb2.Envelope) -> ServedCall:
            envelope.timeout_ms = 0
            return arrive(server, source, envelope)

        Server.arrive = arrive_for_ever

    def call() -> None:
        futures = [rpc.rpc_async("worker1", keep, (f"late {index}",), timeout=0.2) for index in range(3)]
        for future in futures:
            with pytest.raises(RpcTimeoutError):
                future.wait()

    b.run(never_expire)
    with stopped(b):
        a.run(call)
    b.run(wait_until, lambda: count_queued() == 3 and not len(waiting_requests()))
    b.run(set_event, "release")
    assert a.run(rpc.rpc_sync, "worker1", add, (1, 1)) == 2
    assert b.run(lambda: remote_functions.kept) == []
    a.run(lambda: remote_functions.kept.clear())
    a.run(assert_clean)


def test_one_that_cannot_be_ended_keeps_no_other_from_expiring(caplog):
    expired: queue.SimpleQueue[int] = queue.SimpleQueue()

    def expire(identifier: int) -> None:
        if identifier == 1:
            raise RuntimeError("can't start new thread")
        expired.put(identifier)

    live = {1, 2}
    started = Deadlines(expire, live.__contains__, "gradwire-deadlines-test")
    try:
        started.add(1, 0.0)
        started.add(2, 0.001)
        assert expired.get(timeout=60) == 2
    finally:
        started.close()
    assert "a request that has timed out cannot be ended" in caplog.text
