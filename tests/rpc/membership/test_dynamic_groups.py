"""Dynamic groups, whose workers join and leave at any time."""

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch
from gradwire import rpc
from gradwire.c10d import HashStore
from gradwire.errors import RendezvousError, WorkerLostError
from gradwire.net.user_sockets import SocketDirectory
from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.messages import MessageType, Request
from gradwire.rpc.contracts.worker import Member
from gradwire.rpc.membership import roster
from gradwire.rpc.membership.roster import RosterLog
from gradwire.rpc.transports import grpc_endpoint

from tests import remote_functions
from tests.addresses import address_here
from tests.event_loop import run_on_loop
from tests.remote_functions import add, assert_clean, identity, keep, set_event, wait_until

MIB = 1 << 20


def join(name: str, url: str, rank: int = -1, **options) -> rpc.WorkerInfo:
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.RpcBackendOptions(init_method=url, **options))
    return rpc.get_worker_info()


def members() -> set[str]:
    return {worker.name for worker in rpc.api.current_agent().workers()}


def make_list(*items) -> list:
    return list(items)


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path / 'dynamic'}"


@pytest.fixture
def join_one(workers, url):
    def start(name, **options):
        (worker,) = workers(1)
        worker.name = name
        worker.run(join, name, url, **options)
        return worker

    return start


def call_everybody() -> dict[str, str]:
    return {name: rpc.rpc_sync(name, identity, (name,)) for name in members()}


def test_workers_join_and_leave_while_others_go_on(join_one, workers):
    first = [join_one(f"first{i}") for i in range(6)]
    everybody = {worker.name for worker in first}
    assert all(worker.run(members) == everybody for worker in first)

    def hold_list_on(name):
        rref = rpc.remote(name, make_list, (1, 2))
        keep(rref)
        return rpc.rpc_sync("first5", keep, (rref,))

    first[0].run(hold_list_on, "first4")

    for leaver in first[1:4]:
        leaver.run(rpc.shutdown)
    staying = [first[0], first[4], first[5]]
    for worker in staying:
        worker.run(lambda: wait_until(lambda: members() == {"first0", "first4", "first5"}))
        assert worker.run(call_everybody) == {name: name for name in ("first0", "first4", "first5")}
    assert first[5].run(lambda: remote_functions.kept[0].to_here()) == [1, 2]

    second = [join_one(name) for name in ("second0", "second1", "first1")]  # a name may come back
    now = {"first0", "first4", "first5", "second0", "second1", "first1"}
    for worker in [*staying, *second]:
        assert worker.run(members) == now
        assert worker.run(call_everybody) == {name: name for name in now}
    gathered = workers.each([*staying, *second], lambda: rpc.all_gather(rpc.get_worker_info().id))
    assert all(each == gathered[0] for each in gathered)
    assert gathered[0].keys() == now
    assert set(gathered[0].values()) == {0, 4, 5, 6, 7, 8}

    def read_and_drop():
        assert remote_functions.kept.pop().rpc_sync().__len__() == 2

    for worker in (first[0], first[5]):
        worker.run(read_and_drop)
    for worker in [*staying, *second]:
        worker.run(assert_clean)
        worker.run(rpc.shutdown)


def test_calls_to_a_worker_that_has_left(join_one):
    a, b = join_one("a"), join_one("b")
    b.run(rpc.shutdown)

    def check():
        wait_until(lambda: members() == {"a"})
        with pytest.raises(WorkerLostError, match="'b' is lost: it has shut down"):
            rpc.rpc_sync("b", add, (1, 1))

    a.run(check)


def wait_and_leave() -> None:
    remote_functions.wait_for("leave")
    rpc.shutdown()


def answer_and_leave(numel: int) -> torch.Tensor:
    """Returns a tensor of float32 of this shape; this worker leaves as soon as it has answered."""
    set_event("leave")
    return torch.ones(numel)


def yield_and_leave(numel: int) -> Iterator[torch.Tensor]:
    for _ in range(5):
        yield torch.ones(numel)
    set_event("leave")


@contextmanager
def busy_threads() -> Iterator[None]:
    """Keeps this process busy, so that some time passes between any two steps of its other threads."""
    has_ended = threading.Event()

    def work() -> None:
        while not has_ended.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("transport", "numel"), [("unix", 1), ("unix", MIB), ("tcp", MIB), ("grpc", MIB)])
def test_what_a_worker_has_answered_arrives_although_it_leaves_at_once(join_one, url, transport, numel):
    """An answer in full, and a stream to its end, whatever carries their tensors."""
    options = {"transports": tuple({transport, "grpc"})}
    a, b = (join_one(name, **options) for name in "ab")

    def call() -> None:
        assert torch.equal(rpc.rpc_sync("b", answer_and_leave, (numel,)), torch.ones(numel))

    def stream() -> None:
        received = list(rpc.rpc_stream("b", yield_and_leave, (numel,)))
        assert len(received) == 5
        assert all(torch.equal(each, torch.ones(numel)) for each in received)

    def busily(check: Callable[[], None]) -> None:
        wait_until(lambda: members() == {"a", "b"})
        with busy_threads():
            check()

    for check in (call, stream) * 2:
        b.run(lambda: remote_functions.event("leave").clear())
        leaving = b.start(wait_and_leave)
        a.run(busily, check)
        leaving.result()
        b.run(join, "b", url, **options)


def sockets_of(process: int) -> list[str]:
    """Returns the unix sockets of a process, in the directory of this user."""
    return [name for name in os.listdir(SocketDirectory.of_this_user().path) if name.startswith(f"{process}-")]


def test_the_socket_of_a_killed_worker_is_removed_by_those_who_notice(join_one):
    a, b = join_one("a"), join_one("b")
    c = join_one("c")
    assert len(sockets_of(b.pid)) == len(sockets_of(c.pid)) == 1
    b.kill()
    wait_until(lambda: not sockets_of(b.pid))
    for worker in (a, c):  # and nobody is left to notice
        worker.kill()
    d = join_one("a")  # which finds the one whose name it has, and those that it greets
    assert d.run(members) == {"a"}
    assert not sockets_of(a.pid) + sockets_of(c.pid)


def come_and_go(url: str, count: int) -> None:
    for number in range(count):
        join(f"guest{number}", url)
        rpc.shutdown(graceful=False)


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_workers_that_come_and_go_leave_little_behind(join_one, workers, url):
    a = join_one("a")
    (guest,) = workers(1)
    guest.run(come_and_go, url, 2)
    kept, count = [], a.run(count_objects)
    while len(kept) < 10 and (not kept or kept[-1] >= 25):  # in some rounds a thread is started
        guest.run(come_and_go, url, 4)
        a.run(wait_until, lambda: members() == {"a"})
        before, count = count, a.run(count_objects)
        kept.append((count - before) / 4)
    # What is known of each, and of how it ended: no connections, queues or timers.
    assert kept[-1] < 25, kept


def threads() -> list[str]:
    return [each.name for each in threading.enumerate()]


def shut_down_without_an_answer_of_the_store() -> None:
    answered = threading.Event()
    roster.LEAVE_TIMEOUT_S = 0.01
    RosterLog._append = lambda log, _entry: answered.wait(60) and log._roster.members.clear()
    rpc.shutdown()
    assert not answered.is_set()
    wait_until(lambda: [each for each in threads() if each.startswith("gradwire")] == ["gradwire-leave"])
    answered.set()


def test_a_worker_leaves_although_the_store_does_not_answer(join_one):
    a, b = join_one("a"), join_one("b")
    a.run(shut_down_without_an_answer_of_the_store)
    b.run(wait_until, lambda: members() == {"b"})
    with pytest.raises(WorkerLostError, match="'a' is lost: it has shut down"):
        b.run(rpc.rpc_sync, "a", add, (1, 1))


def test_a_dead_worker_delays_nobody_and_can_be_replaced(join_one):
    a, b = join_one("a"), join_one("b")
    b.kill()
    c = join_one("c")
    assert c.run(members) == {"a", "c"}
    d = join_one("b")
    assert d.run(call_everybody) == {name: name for name in ("a", "b", "c")}
    assert a.run(call_everybody) == {name: name for name in ("a", "b", "c")}


@pytest.mark.parametrize("others", [0, 1])
def test_a_dead_worker_can_be_restarted_under_its_name(join_one, others):
    staying = [join_one(f"other{i}") for i in range(others)]
    join_one("a").kill()
    a = join_one("a")
    everybody = {"a", *(worker.name for worker in staying)}
    for worker in [a, *staying]:
        assert worker.run(call_everybody) == {name: name for name in everybody}


def test_ranks_and_names_that_are_taken(join_one, workers, url):
    join_one("a", rank=5)
    (other,) = workers(1)
    with pytest.raises(RendezvousError, match="worker name 'a' is not unique"):
        other.run(join, "a", url)
    with pytest.raises(RendezvousError, match="rank 5 is taken"):
        other.run(join, "b", url, 5)
    assert other.run(join, "b", url, 3) == rpc.WorkerInfo("b", 3)


def test_a_refused_worker_does_not_remove_members(join_one, workers, url):
    a = join_one("a")
    (newer,) = workers(1)

    def join_with_another_protocol():
        grpc_endpoint.PROTOCOL += 1
        join("newer", url)

    with pytest.raises(RendezvousError, match="'a' refuses 'newer'.*install the same gradwire on both"):
        newer.run(join_with_another_protocol)
    b = join_one("b")
    assert a.run(call_everybody) == b.run(call_everybody) == {"a": "a", "b": "b"}


def test_device_maps_are_checked(join_one, workers, url):
    join_one("a", device_maps={"later": {"cpu": "cpu"}})
    (other,) = workers(1)
    for to, side, owner in (("later", "source", "b"), ("a", "target", "a")):
        here = "cuda:99" if side == "source" else "cpu"
        with pytest.raises(
            RendezvousError, match=f"{side} devices with invalid indices in its device map for {to}: {owner} has"
        ):
            other.run(join, "b", url, device_maps={to: {here: "cuda:99"}})


def test_many_join_at_once(workers, url):
    started = workers(6)
    infos = [p.result() for p in [worker.start(join, worker.name, url) for worker in started]]
    assert {info.id for info in infos} == set(range(6))
    for worker in started:
        assert worker.run(call_everybody) == {other.name: other.name for other in started}


def test_an_empty_group_begins_a_new_epoch(join_one):
    for _ in range(2):
        a, b = join_one("a", rank=0), join_one("b", rank=1)
        assert a.run(call_everybody) == {"a": "a", "b": "b"}
        for worker in (a, b):
            worker.run(rpc.shutdown)


def test_static_and_dynamic_do_not_mix(workers, url):
    a, b = workers(2)
    a.run(join, "a", url)

    def join_static():
        options = rpc.RpcBackendOptions(init_method=url)
        rpc.init_rpc("b", rank=1, world_size=2, rpc_backend_options=options)

    with pytest.raises(RendezvousError, match="mixes statically and dynamically initialized members"):
        b.run(join_static)


@pytest.fixture
def enter():
    """Returns a function that makes an agent which is in the log and has greeted no member."""
    agents = []

    def start(name, log):
        agent = GrpcAgent(log.choose(name, -1), rpc.RpcBackendOptions(), "dynamic/group/0", log)
        agents.append(agent)
        assert log.join(Member(agent.info, agent.listen(address_here())))
        return agent

    yield start
    for agent in agents:
        agent.shutdown(graceful=False, timeout=0)


def test_a_worker_that_is_read_of_in_the_log_before_its_hello_is_admitted(enter):
    """A member also reads the log when it removes a dead worker, and may find a new member there."""
    store = HashStore()
    logs = RosterLog(store), RosterLog(store)
    a = enter("a", logs[0])
    a.open(logs[0].members())
    logs[1].catch_up()
    b = enter("b", logs[1])
    logs[0].catch_up()
    b.open(logs[1].members())
    assert b.request(a.info, Request(MessageType.GREETING, None)).wait() is None
    assert a.workers() == [a.info, b.info]


def test_a_forged_roster_gives_nobody_the_name_of_a_member(enter):
    """Its hello named a member's name with another id and address, and was believed."""
    store = HashStore()
    log = RosterLog(store)
    a = enter("a", log)
    a.open(log.members())
    forged = Member(rpc.WorkerInfo("a", 7), "203.0.113.7:1")
    before = log.version
    version = log.version.followed_by(json.dumps({"join": asdict(forged)}))
    roster = agent_pb2.RosterVersion(length=version.length, digest=version.digest)
    hello = agent_pb2.Hello(protocol=1, group="dynamic/group/0", worker_id=7, worker_name="a", roster=roster)
    admit = a._network._handshake.admit(hello, None)
    with pytest.raises(grpc_endpoint.RefusedError, match="entry 1 of its roster is not in the store"):
        run_on_loop(admit)
    assert a.workers() == [a.info]
    assert a.worker("a") == a.info
    assert log.version == before
