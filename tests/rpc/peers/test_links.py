"""Links that break and heal: a worker is suspect while it does not answer, and what it holds stays."""

import asyncio
import secrets
import threading
import time
from dataclasses import replace

import pytest
import torch
from gradwire import Outcome, rpc
from gradwire.c10d import Credentials
from gradwire.errors import EvictedError, RpcTimeoutError, RRefError, WorkerLostError, WorkerSuspectError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.rpc.peers import link
from gradwire.rpc.transports.liveness import Reach
from gradwire.rref.forks import PassedOn, References

from tests import remote_functions
from tests.remote_functions import add, assert_clean, identity, keep, set_event, wait_for, wait_until
from tests.rpc.agent.test_several_hosts import join_all
from tests.rpc.peers import links
from tests.rpc.peers.links import LIVENESS
from tests.stopped import stopped

TRANSPORTS = [("unix", "tcp", "grpc"), ("tcp", "grpc"), ("grpc",)]


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_connection_that_is_cut_heals(workers, transports):
    a, b = workers.rpc(2, transports=transports, liveness=LIVENESS)

    def begin() -> None:
        links.record_events()
        keep(rpc.remote("worker1", torch.ones, (3,)))
        assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
        wait_until(remote_functions.kept[-1].confirmed_by_owner)
        mine = rpc.RRef(torch.zeros(2))
        rpc.rpc_sync("worker1", keep, (mine,))
        links.call_for_ever("worker1")

    def check() -> None:
        links.cut(1)
        links.assert_suspect(links.futures[-1])
        wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])
        wait_until(lambda: links.state_of("worker1") == "connected")
        assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
        large = torch.ones(1 << 20)
        for _ in range(3):
            assert torch.equal(rpc.rpc_sync("worker1", identity, (large,)), large)

    a.run(begin)
    a.run(check)

    def read_reference() -> None:
        wait_until(lambda: links.state_of("worker0") == "connected")
        assert torch.equal(remote_functions.kept[-1].to_here(), torch.zeros(2))
        set_event("never")

    b.run(read_reference)
    a.run(lambda: wait_until(lambda: links.state_of("worker1") == "connected"))


def have_a_reference_and_a_call() -> None:
    """Has this worker record events, and have a reference to a value of worker 1 and an endless call to it."""
    links.record_events()
    keep(rpc.remote("worker1", torch.ones, (3,)))
    assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
    wait_until(remote_functions.kept[-1].confirmed_by_owner)
    links.call_for_ever("worker1")


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_stopped_worker_is_suspect_and_comes_back(workers, transports):
    a, b = workers.rpc(2, transports=transports, liveness=LIVENESS)

    def while_stopped() -> None:
        links.assert_silent(links.futures[-1])
        assert links.state_of("worker1") == "suspect"
        begun = time.monotonic()
        with pytest.raises(WorkerSuspectError) as caught:
            rpc.rpc_sync("worker1", add, (1, 1))
        assert caught.value.outcome is Outcome.NOT_SENT
        assert time.monotonic() - begun < 10
        wait_until(lambda: links.seen == [("suspect", "worker1")])

    def after() -> None:
        wait_until(lambda: links.state_of("worker1") == "connected")
        assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
        wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])

    a.run(have_a_reference_and_a_call)
    with stopped(b):
        a.run(while_stopped)
    a.run(after)
    b.run(set_event, "never")
    assert b.run(rpc.rpc_sync, "worker0", add, (1, 1)) == 2


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_killed_worker_is_lost_at_once(workers, transports):
    a, b = workers.rpc(2, transports=transports, liveness=rpc.Liveness(suspect_after=100.0, lease=100.0))

    def begin() -> None:
        links.record_events()
        links.call_for_ever("worker1")

    def check() -> None:
        with pytest.raises(WorkerLostError):
            links.futures[-1].wait()
        with pytest.raises(WorkerLostError):
            rpc.rpc_sync("worker1", add, (1, 1))
        assert links.state_of("worker1") == "lost"
        wait_until(lambda: links.seen == [("left", "worker1")])

    a.run(begin)
    b.kill()
    a.run(check)


def notice_late() -> None:
    """Has this worker find that one listens whose connection breaks, and then be kept from looking again."""
    found = iter([Reach.LISTENING])
    look = link.probe_now
    link.probe_now = lambda *args: next(found, None) or look(*args)

    async def wait_for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    link.probe = wait_for_ever


def test_a_killed_worker_that_listened_a_little_longer_is_not_suspect(workers):
    """It was, if this worker had not connected to it again, in vain, within 0.1 s."""
    a, b = workers.rpc(2, rpc_timeout=0)

    def begin() -> None:
        links.record_events()
        links.call_for_ever("worker1")
        notice_late()

    def check() -> None:
        with pytest.raises(WorkerLostError):
            links.futures[-1].wait()
        wait_until(lambda: links.seen == [("left", "worker1")])

    a.run(begin)
    b.kill()
    a.run(check)


def test_the_lease_of_a_worker_ends(workers):
    a, b = workers.rpc(2, liveness=replace(LIVENESS, lease=1.0))

    def begin() -> None:
        links.record_events()
        links.call_for_ever("worker1")

    def while_stopped() -> None:
        links.assert_silent(links.futures[-1])
        wait_until(lambda: links.seen == [("suspect", "worker1"), ("left", "worker1")])
        with pytest.raises(WorkerLostError, match="did not come back within 1 s: nothing has come from it for"):
            rpc.rpc_sync("worker1", add, (1, 1))

    def find_out() -> None:
        set_event("never")
        wait_until(lambda: links.state_of("worker0") == "lost")
        wait_until(lambda: isinstance(links.error_of_call("worker0"), EvictedError))

    a.run(begin)
    with stopped(b):
        a.run(while_stopped)
    b.run(find_out)


def test_calls_wait_if_they_are_to(workers):
    a, b = workers.rpc(2, liveness=replace(LIVENESS, when_suspect="wait"))

    def begin() -> None:
        links.record_events()
        links.call_for_ever("worker1")

    def while_stopped() -> None:
        links.assert_silent(links.futures.pop())  # it has been sent
        mine = rpc.RRef(torch.ones(2))
        large = torch.ones(1 << 20)
        links.futures.append(rpc.rpc_async("worker1", identity, ((mine, large, 7),)))
        links.futures.append(rpc.rpc_async("worker1", add, (1, 2)))
        cancelled = rpc.rpc_async("worker1", add, (1, 2))
        assert cancelled.cancel()
        with pytest.raises(RpcTimeoutError):
            rpc.rpc_sync("worker1", add, (1, 1), timeout=0.1)
        assert not any(future.done() for future in links.futures)

    def after() -> None:
        reference, large, number = links.futures[0].wait()
        assert torch.equal(reference.to_here(), torch.ones(2))
        assert torch.equal(large, torch.ones(1 << 20))
        assert number == 7
        assert links.futures[1].wait() == 3

    def clean() -> None:
        links.futures.clear()
        assert_clean()

    a.run(begin)
    with stopped(b):
        a.run(while_stopped)
    a.run(after)
    b.run(set_event, "never")
    a.run(clean)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reference_in_a_call_that_waits_is_not_asked_about_as_one_that_may_be_lost(workers, is_late):
    """Whether the loss of the connection is handled before the call is made, or after."""
    a, b = workers.rpc(2, liveness=replace(LIVENESS, when_suspect="wait"))

    def begin() -> None:
        links.call_for_ever("worker1")
        handle = References.on_worker_suspect

        def on_worker_suspect(references: References, worker: rpc.WorkerInfo, reason: str) -> None:
            if is_late:
                wait_for("called")
            handle(references, worker, reason)
            set_event("handled")

        References.on_worker_suspect = on_worker_suspect

    def while_stopped() -> None:
        links.assert_silent(links.futures.pop())
        if not is_late:
            wait_for("handled")
        links.futures.append(rpc.rpc_async("worker1", identity, (rpc.RRef(torch.ones(2)),)))
        set_event("called")
        wait_for("handled")
        assert list(passed_on()._unsure.values()) == [{}]

    def after() -> None:
        assert torch.equal(links.futures.pop().wait().to_here(), torch.ones(2))
        assert passed_on()._postponed == set()

    def passed_on() -> PassedOn:
        return current_agent().extension(References)._passed_on

    a.run(begin)
    with stopped(b):
        a.run(while_stopped)
    a.run(after)


def test_a_creation_that_was_never_sent_leaves_nothing_behind(workers):
    """Its time was up while its worker did not answer: no worker waits for it when the group shuts down."""
    a, b = workers.rpc(2, liveness=replace(LIVENESS, when_suspect="wait"))

    def while_stopped() -> None:
        links.assert_silent(links.futures.pop())
        made = rpc.remote("worker1", torch.ones, (2,), timeout=0.2)
        with pytest.raises(RpcTimeoutError) as caught:
            made.to_here(timeout=5)
        assert caught.value.outcome is Outcome.NOT_SENT
        keep(made)

    def clean() -> None:
        remote_functions.kept.clear()
        assert_clean()

    a.run(links.call_for_ever, "worker1")
    with stopped(b):
        a.run(while_stopped)
    a.run(wait_until, lambda: links.state_of("worker1") == "connected")
    b.run(set_event, "never")
    a.run(clean)
    b.run(assert_clean)
    for pending in [each.start(rpc.shutdown, timeout=20) for each in (a, b)]:
        pending.result()


def test_who_got_a_reference_to_a_creation_that_was_never_sent_hears_of_it(workers):
    """Its creator has passed the reference on before its time was up, and still has it."""
    a, b, c = workers.rpc(3, liveness=replace(LIVENESS, when_suspect="wait"))

    def while_stopped() -> None:
        links.assert_silent(links.futures.pop())
        made = rpc.remote("worker1", torch.ones, (2,), timeout=1.0)
        rpc.rpc_sync("worker2", keep, (made,))
        with pytest.raises(RpcTimeoutError):
            made.to_here(timeout=5)
        keep(made)

    def fetch() -> None:
        with pytest.raises(RRefError):
            remote_functions.kept[0].to_here(timeout=20)

    a.run(links.call_for_ever, "worker1")
    with stopped(b):
        a.run(while_stopped)
    a.run(wait_until, lambda: links.state_of("worker1") == "connected")
    b.run(set_event, "never")
    c.run(fetch)
    for each in (a, c):
        each.run(lambda: remote_functions.kept.clear())
    for each in (a, b, c):
        each.run(assert_clean)


def hold_the_interpreter_of(name: str) -> None:
    """Checks that a worker is not suspect while a program holds its interpreter, nor this one to it meanwhile."""
    links.record_events()
    assert rpc.rpc_sync(name, add, (1, 1)) == 2
    links.suspect_after(0.5)
    rpc.rpc_sync(name, links.stall_threads, (1.2,))
    assert rpc.rpc_sync(name, add, (1, 1)) == 2
    rpc.rpc_sync(name, links.suspect_after, (0.5,))
    links.stall_threads(1.2)
    assert rpc.rpc_sync(name, add, (1, 1)) == 2
    assert not links.seen


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_worker_whose_interpreter_is_held_is_not_suspect(workers, transports):
    a, _ = workers.rpc(2, transports=transports, liveness=LIVENESS)
    a.run(hold_the_interpreter_of, "worker1")


@pytest.mark.parametrize("transports", [("tcp", "grpc"), ("grpc",)])
def test_nor_is_one_of_another_host(hosts, transports):
    net = hosts(1, 1)
    options = (
        {"credentials": Credentials(token=secrets.token_hex(32))} if "tcp" in transports else {"insecure": True}
    )
    variables = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500"}
    for pending in join_all(net.workers, variables, liveness=LIVENESS, transports=transports, **options):
        pending.result()
    a, b = net.workers
    a.run(hold_the_interpreter_of, "worker1")
    with stopped(b):
        a.run(begin_to_suspect)


def begin_to_suspect() -> None:
    """Suspects a stopped worker, whose kernel acknowledges all that is sent to it."""
    wait_until(lambda: links.seen == [("suspect", "worker1")])


def test_a_worker_whose_interpreter_is_held_for_longer_than_a_lease_is_suspect(workers):
    a, _ = workers.rpc(2, liveness=replace(LIVENESS, lease=1.5))

    def check() -> None:
        links.record_events()
        links.call_for_ever("worker1")
        links.suspect_after(0.5)
        rpc.rpc_async("worker1", links.stall_threads, (3.0,), timeout=0)
        links.assert_suspect(links.futures[-1])
        wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        rpc.rpc_sync("worker1", set_event, ("never",))

    a.run(check)


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_idle_and_busy_workers_are_not_suspect(workers, transports):
    a, b = workers.rpc(
        2, transports=transports, liveness=rpc.Liveness(heartbeat=0.05, suspect_after=1.6), num_worker_threads=2
    )

    def check() -> None:
        links.record_events()
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        idle = threading.Event()
        assert not idle.wait(2.0)
        busy = [rpc.rpc_async("worker1", time.sleep, (1.5,)) for _ in range(4)]
        for future in busy:
            future.wait()
        assert not links.seen
        assert links.state_of("worker1") == "connected"

    a.run(check)
    assert b.run(links.state_of, "worker0") == "connected"


def test_a_connection_with_tls_heals(workers):
    options = {
        "host": "127.0.0.1",
        "credentials": Credentials(token=secrets.token_hex(32)),
        "transports": ("tcp", "grpc"),
    }
    a, b = workers.rpc(2, liveness=LIVENESS, **options)

    def cut() -> None:
        links.record_events()
        links.call_for_ever("worker1")
        assert rpc.debug_info()["transports"]["worker1"] == "tcp"
        links.cut(1)
        links.assert_suspect(links.futures[-1])
        wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])
        assert torch.equal(rpc.rpc_sync("worker1", identity, (torch.ones(1 << 20),)), torch.ones(1 << 20))
        assert rpc.debug_info()["transports"]["worker1"] == "tcp"
        links.call_for_ever("worker1", "later")

    a.run(cut)
    with stopped(b):
        a.run(lambda: links.assert_silent(links.futures[-1]))
    a.run(lambda: wait_until(lambda: links.state_of("worker1") == "connected"))
    assert a.run(rpc.rpc_sync, "worker1", add, (1, 1)) == 2
    for event in ("never", "later"):
        b.run(set_event, event)


@pytest.mark.parametrize("transports", [("tcp", "grpc"), ("grpc",)])
def test_hosts_that_are_parted_for_a_while(hosts, transports):
    net = hosts(1, 1)
    a, b = net.workers
    variables = {"MASTER_ADDR": net.address(0), "MASTER_PORT": "29500"}
    for pending in join_all([a, b], variables, insecure=True, liveness=LIVENESS, transports=transports):
        pending.result()

    def while_parted() -> None:
        links.assert_silent(links.futures[-1])
        wait_until(lambda: links.seen == [("suspect", "worker1")])

    def suspect_worker0() -> None:
        links.suspect_after(1.0)
        wait_until(lambda: links.state_of("worker0") == "suspect")
        links.suspect_after(LIVENESS.suspect_after)

    def after() -> None:
        wait_until(lambda: links.state_of("worker1") == "connected")
        assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
        wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])

    a.run(have_a_reference_and_a_call)
    net.unplug(1)
    a.run(while_parted)
    b.run(suspect_worker0)
    net.plug(1)
    a.run(after)
    b.run(set_event, "never")
    assert b.run(rpc.rpc_sync, "worker0", add, (1, 1)) == 2
