"""Static groups, in which a worker that has died is started again under its name and rank."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gradwire import launch, rpc
from gradwire.c10d import TCPStore
from gradwire.errors import RendezvousError, WorkerLostError, WorkerSuspectError
from gradwire.rpc.contracts.agent import current_agent

from tests.remote_functions import add, wait_until
from tests.rpc.channels.broadcasts import BETWEEN_HOSTS, LARGE, each_result, group_count, total
from tests.rpc.membership.test_worker_events import next_event, register
from tests.workers import Worker

SIZE = 3
OPTIONS = {"init_timeout": 50}

Join = Callable[..., Worker]


def join(rank: int, port: int, name: str = "", size: int = SIZE, **options: Any) -> None:
    store = TCPStore("127.0.0.1", port)
    settings = rpc.RpcBackendOptions(**{**OPTIONS, **options})
    rpc.init_rpc(name or f"w{rank}", rank=rank, world_size=size, rpc_backend_options=settings, store=store)


@pytest.fixture
def port() -> Iterator[int]:
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield store.port


@pytest.fixture
def group(workers: Any, port: int) -> list[Worker]:
    made = list(workers(SIZE))
    for pending in [worker.start(join, rank, port) for rank, worker in enumerate(made)]:
        pending.result()
    return made


def call_everybody() -> dict[str, int]:
    return {worker.name: rpc.rpc_sync(worker, os.getpid) for worker in current_agent().workers()}


def reach_everybody(group: list[Worker]) -> None:
    expected = {f"w{rank}": worker.pid for rank, worker in enumerate(group)}
    for worker in group:
        assert worker.run(call_everybody) == expected


def ranks() -> list[tuple[str, int]]:
    return [(worker.name, worker.id) for worker in current_agent().workers()]


def hold_value_on(name: str) -> None:
    held["value"] = rpc.remote(name, add, (1, 2))
    held["info"] = rpc.get_worker_info(name)
    assert held["value"].to_here() == 3


def fail_to_call(name: str) -> None:
    def is_lost() -> bool:
        try:
            rpc.rpc_sync(name, add, (1, 2))
        except WorkerLostError:
            return True
        except WorkerSuspectError:  # while its process ends
            pass
        return False

    wait_until(is_lost)


def use_old_identity() -> int:
    with pytest.raises(WorkerLostError):
        held["value"].to_here()
    with pytest.raises(WorkerLostError):
        held["value"].rpc_sync().bit_length()
    held.pop("value")
    return rpc.rpc_sync(held.pop("info"), os.getpid)


held: dict[str, Any] = {}


def test_a_killed_worker_comes_back_into_a_static_group(group, workers, port):
    group[0].run(hold_value_on, "w1")
    group[0].run(register)
    group[1].kill()
    for other in (group[0], group[2]):
        other.run(fail_to_call, "w1")
    (again,) = workers(1)
    again.run(join, 1, port)
    group[1] = again
    reach_everybody(group)
    ended = ("left", "w1", "its process has ended without a goodbye")
    assert [group[0].run(next_event), group[0].run(next_event)] == [ended, ("joined", "w1")]
    for worker in group:
        assert worker.run(ranks) == [("w0", 0), ("w1", 1), ("w2", 2)]
    assert group[0].run(use_old_identity) == again.pid
    gathered = [worker.start(lambda: rpc.all_gather(os.getpid())) for worker in group]
    expected = {f"w{rank}": worker.pid for rank, worker in enumerate(group)}
    assert [each.result() for each in gathered] == [expected] * SIZE
    for each in [worker.start(rpc.shutdown) for worker in group]:
        each.result()


def gather_and_broadcast(names: list[str]) -> tuple[list[dict[str, int]], dict[str, list[float]], int]:
    """Runs collectives, and what goes through process groups of the first workers; returns how many there are."""
    gathered = [rpc.all_gather(number) for number in range(6)]
    receivers = [[name for name in names if name != left_out] for left_out in names]
    tensor = torch.ones(LARGE)
    sums = {" ".join(each): each_result(each, total, (tensor,)) for each in receivers}
    rpc.all_gather("all have sent")
    return gathered, sums, group_count()


@pytest.mark.parametrize("restarts", [True, False])
def test_with_a_worker_that_has_come_back_there_are_no_process_groups(workers, port, restarts):
    """As in dynamic groups, large tensors go to each worker by itself."""
    options = {"transports": BETWEEN_HOSTS, "insecure": True}
    group = list(workers(SIZE))
    for pending in [worker.start(join, rank, port, **options) for rank, worker in enumerate(group)]:
        pending.result()
    if restarts:
        group[1].kill()
        (group[1],) = workers(1)
        group[1].run(join, 1, port, **options)
        reach_everybody(group)
    names = [f"w{rank}" for rank in range(SIZE)]
    for gathered, sums, broadcast_groups in workers.each(group, gather_and_broadcast, names):
        assert gathered == [dict.fromkeys(names, number) for number in range(6)]
        assert sums == {"w1 w2": [LARGE] * 2, "w0 w2": [LARGE] * 2, "w0 w1": [LARGE] * 2}
        assert bool(broadcast_groups) is not restarts
    for each in [worker.start(rpc.shutdown) for worker in group]:
        each.result()


def test_it_may_come_back_again_and_again(group, workers, port):
    for rank in (1, 0, 1, 2, 1):
        group[rank].kill()
        (again,) = workers(1)
        again.run(join, rank, port)
        group[rank] = again
    reach_everybody(group)
    for each in [worker.start(rpc.shutdown) for worker in group]:
        each.result()


def test_of_two_live_processes_the_second_is_refused(group, workers, port):
    (second,) = workers(1)
    with pytest.raises(RendezvousError, match=r"two workers have rank 1: 'w1' \(process \d+ on .*\); give each"):
        second.run(join, 1, port)
    reach_everybody(group)


def test_of_two_that_want_a_place_one_gets_it(group, workers, port):
    group[1].kill()
    new = workers(2)
    pending = [each.start(join, 1, port) for each in new]
    results = []
    for each in pending:
        try:
            results.append(each.result())
        except RendezvousError as error:
            results.append(error)
    winner = results.index(None)
    assert "two workers have rank 1" in str(results[1 - winner])
    group[1] = new[winner]
    reach_everybody(group)


def test_the_same_store_serves_another_group_after_a_shutdown(group, workers, port):
    group[1].kill()
    (group[1],) = workers(1)
    group[1].run(join, 1, port)
    reach_everybody(group)
    for each in [worker.start(rpc.shutdown) for worker in group]:
        each.result()
    (group[2],) = workers(1)  # another process, which has had no part in the first group
    for each in [worker.start(join, rank, port) for rank, worker in enumerate(group)]:
        each.result()
    reach_everybody(group)


def test_a_group_whose_members_have_all_died_forms_again(group, workers, port):
    for worker in group:
        worker.kill()
    new = list(workers(SIZE))
    for each in [worker.start(join, rank, port) for rank, worker in enumerate(new)]:
        each.result()
    reach_everybody(new)


def restart_count() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def lose_and_get_back(rank: int, folder: Path) -> None:
    """worker0 kills worker1, and calls the one that is started in its place."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=SIZE)

    def is_back() -> bool:
        try:
            return rpc.rpc_sync("worker1", restart_count) == 1
        except (WorkerLostError, WorkerSuspectError):
            return False

    if rank == 0:
        first = rpc.rpc_sync("worker1", os.getpid)
        os.kill(first, signal.SIGKILL)
        fail_to_call("worker1")
        wait_until(is_back)
        assert rpc.rpc_sync("worker1", os.getpid) != first
        (folder / "done").touch()
    if restart_count() or rank != 1:
        wait_until((folder / "done").exists, 60)
    else:
        signal.pause()
    rpc.barrier()
    rpc.shutdown()


def test_spawn_starts_workers_of_static_groups_again(tmp_path):
    launch.spawn(lose_and_get_back, SIZE, (tmp_path,), start_method="forkserver", restarts=1)
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("listens", [True, False])
def test_what_answers_nothing_is_silent_and_what_refuses_is_gone(listens):
    from gradwire.rpc.contracts.worker import Member, WorkerInfo
    from gradwire.rpc.membership.addresses import ListenAddress, Presence, presence_of

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        member = Member(WorkerInfo("a", 0), f"127.0.0.1:{server.getsockname()[1]}", 0)
        assert presence_of(member, ListenAddress(None), 0.2) is (Presence.SILENT if listens else Presence.GONE)


def test_a_link_local_address_is_asked_on_its_interface():
    from gradwire.net.addresses import format_address
    from gradwire.rpc.contracts.worker import Member, WorkerInfo
    from gradwire.rpc.membership.addresses import ListenAddress, Presence, presence_of

    every = [each.address for interface in psutil.net_if_addrs().values() for each in interface]
    host = next((each for each in every if each.startswith("fe80:") and "%" in each), None)
    if host is None:
        pytest.skip("no interface has a link-local address")
    with socket.socket(socket.AF_INET6) as server:
        server.bind(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4])
        member = Member(WorkerInfo("a", 0), format_address(host, server.getsockname()[1]), 0)
        assert presence_of(member, ListenAddress(None, any_host=True), 5.0) is Presence.GONE
