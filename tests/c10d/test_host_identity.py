"""Process groups on several hosts: the choice of engine and address, and the loss of hosts."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d import failure_detector
from gradwire.c10d import host_identity as hosts_module
from gradwire.errors import ProcessGroupError, RankLostError

from tests.c10d.members import MIB, everywhere, receive, total
from tests.hosts import MEMORY, NETWORK, Network, separate
from tests.workers import Worker

PORT = 29500


def make_group(host: str, rank: int, size: int, backend: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    failure_detector.KEEPALIVE_INTERVAL_S = 1
    c10d.init_process_group(backend, f"tcp://{host}:{PORT}", world_size=size, rank=rank, timeout=60, insecure=True)


def make_group_of(members: Sequence[Worker], host: str, backend: str, **variables: str) -> None:
    """Makes a group of these workers; the first of them is at the address."""
    size = len(members)
    for pending in [
        each.start(make_group, host, rank, size, backend, variables) for rank, each in enumerate(members)
    ]:
        pending.result()


def make_group_on(net: Network, backend: str, **variables: str) -> list[Worker]:
    """Makes a group of all workers of a network."""
    make_group_of(net.workers, net.address(0), backend, **variables)
    return net.workers


def engine() -> str:
    """Returns the name of the default group's engine."""
    return dist.group.WORLD.engine("cpu").name


def engine_of(*ranks: int) -> str:
    """Returns the name of the engine of a new group of these ranks; "" on other ranks."""
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return ""
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == len(ranks)
    return group.engine("cpu").name


def exchange(count: int = MIB) -> bool:
    """Runs small and large operations; returns whether their results are right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right = total() == sum(range(size))
    large = torch.full((count + 1,), float(rank + 1))
    dist.all_reduce(large)
    right &= bool((large == sum(range(size + 1))).all())
    parts = [torch.empty(3) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank)))
    right &= [part[2].item() for part in parts] == list(range(size))
    word = torch.full((1000,), rank)
    dist.broadcast(word, size - 1)
    right &= bool((word == size - 1).all())
    came = torch.empty(count)
    sent = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    sent.wait()
    dist.barrier()
    return right and bool((came == (rank - 1) % size).all())


@pytest.mark.parametrize("backend", ["gradwire_gloo", "gradwire_mpi"])
def test_operations_between_hosts(hosts, backend):
    if backend == "gradwire_mpi":
        pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    assert everywhere(make_group_on(hosts(2, 1), backend), exchange) == [True] * 3


def test_the_best_engine_is_shared_memory_only_within_a_host(hosts):
    members = make_group_on(hosts(2, 1), "gradwire")
    assert everywhere(members, engine) == ["gloo"] * 3
    assert everywhere(members, engine_of, 0, 1) == ["shm", "shm", ""]
    assert everywhere(members, engine_of, 1, 2) == ["", "gloo", "gloo"]


def test_shared_memory_is_refused_between_hosts_on_all_ranks(hosts):
    net = hosts(1, 1)
    for rank, each in enumerate(net.workers):
        each.pending = each.start(make_group, net.address(0), rank, 2, "gradwire_shm", {})
    for each in net.workers:
        with pytest.raises(ProcessGroupError, match="rank 0 is on 'host0' and rank 1 on 'host1'"):
            each.pending.result()


def test_containers_that_share_all_but_the_network(hosts):
    members = make_group_on(hosts(1, 1, own=NETWORK), "gradwire")
    assert everywhere(members, engine) == ["shm", "shm"]
    assert everywhere(members, exchange) == [True, True]
    assert everywhere(members, engine_of, 0, 1) == ["shm", "shm"]


@pytest.mark.parametrize("backend", ["gradwire", "gradwire_mpi"])
def test_containers_that_share_only_the_network(hosts, workers, tmp_path, backend):
    if backend == "gradwire_mpi":
        pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    net = hosts(2, own=NETWORK)
    net.workers[1].run(separate, "container", tmp_path, MEMORY)
    members = make_group_on(net, backend)
    assert everywhere(members, engine) == ["gloo" if backend == "gradwire" else "mpi"] * 2
    assert everywhere(members, exchange) == [True, True]


def make_group_by_torch(host: str, rank: int, size: int) -> None:
    """Makes a group through torch's own TCPStore."""
    dist.init_process_group("gradwire", f"tcp://{host}:{PORT}", timedelta(seconds=60), world_size=size, rank=rank)


def test_torchs_own_rendezvous(hosts):
    net = hosts(1, 1)
    for pending in [
        each.start(make_group_by_torch, net.address(0), rank, 2) for rank, each in enumerate(net.workers)
    ]:
        pending.result()
    assert everywhere(net.workers, exchange) == [True, True]


def test_the_interface_can_be_chosen(hosts):
    assert everywhere(make_group_on(hosts(1, 1), "gradwire", GLOO_SOCKET_IFNAME="eth0"), exchange) == [True, True]


def test_an_unknown_interface_is_an_error(hosts):
    with pytest.raises(ProcessGroupError, match="GLOO_SOCKET_IFNAME names .* 'eth7', .* one of lo, eth0"):
        make_group_on(hosts(1, 1), "gradwire", GLOO_SOCKET_IFNAME="eth7")


def test_the_address_for_others(hosts):
    net = hosts(1)
    (worker,) = net.workers
    assert worker.run(hosts_module.address_for_others) == net.address(0)  # there is no default route
    net.add_route(0)
    assert worker.run(hosts_module.address_for_others) == net.address(0)
    net.run_on(0, "ip", "link", "del", "eth0")
    assert worker.run(hosts_module.address_for_others) == hosts_module.LOOPBACK


def test_a_slow_network_is_not_an_error(hosts):
    """The round trip takes 50 ms; the failure detector gives a host up after four seconds."""
    net = hosts(1, 1)
    net.delay(1, 0.025)
    members = make_group_on(net, "gradwire")
    assert everywhere(members, round_trip_seconds)[0] > 0.05
    assert everywhere(members, exchange, MIB // 16) == [True, True]


def round_trip_seconds() -> float:
    """Returns the duration of a message to the other rank and back."""
    word, rank = torch.zeros(1), dist.get_rank()
    began = time.monotonic()
    for sends in (rank == 0, rank == 1):
        if sends:
            dist.send(word, 1 - rank)
        else:
            dist.recv(word, 1 - rank)
    return time.monotonic() - began


def lost_while(function, *args) -> int:
    """Returns the rank whose loss makes a call fail."""
    with pytest.raises(RankLostError) as caught:
        function(*args)
    return caught.value.rank


@pytest.mark.parametrize("backend", ["gradwire_gloo", "gradwire_mpi"])
def test_ranks_on_an_unreachable_host_are_lost(hosts, backend):
    net = hosts(2, 1)
    first, second, third = make_group_on(net, backend)
    waiting = [first.start(lost_while, total), third.start(lost_while, total)]
    waiting.append(second.start(lost_while, receive, 0))
    net.unplug(1)
    assert [each.result() for each in waiting] == [2, 0, 2]
