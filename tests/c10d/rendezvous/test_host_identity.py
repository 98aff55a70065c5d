"""Process groups on several hosts: the choice of engine and address, and the loss of hosts."""

import importlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d import FileStore, TCPStore
from gradwire.c10d.engines.base import Setup
from gradwire.c10d.groups import failure_detector
from gradwire.c10d.rendezvous.hosts import insecure_problem
from gradwire.errors import ProcessGroupError, RankLostError, StoreError
from gradwire.net import addresses
from gradwire.net.host_identity import HostIdentity

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


def make_group_by_torch(host: str, rank: int, size: int, insecure: str, backend: str = "gradwire") -> None:
    """Makes a group through torch's own TCPStore, with GRADWIRE_INSECURE in the environment."""
    os.environ["GRADWIRE_INSECURE"] = insecure
    dist.init_process_group(backend, f"tcp://{host}:{PORT}", timedelta(seconds=60), world_size=size, rank=rank)


def test_torchs_own_rendezvous(hosts):
    net = hosts(1, 1)
    for pending in [
        each.start(make_group_by_torch, net.address(0), rank, 2, "1") for rank, each in enumerate(net.workers)
    ]:
        pending.result()
    assert everywhere(net.workers, exchange) == [True, True]
    assert everywhere(net.workers, exchange_in_new_group) == [True, True]


def exchange_in_new_group() -> bool:
    """Sums up the ranks in a new group, which has torch's PrefixStore over that of the default group."""
    ranks = torch.tensor([dist.get_rank()])
    dist.all_reduce(ranks, group=dist.new_group(backend="gradwire_gloo"))
    return ranks.item() == sum(range(dist.get_world_size()))


def test_an_argument_holds_for_later_groups(hosts):
    assert everywhere(make_group_on(hosts(1, 1), "gradwire"), exchange_in_new_group) == [True, True]


@pytest.mark.parametrize(
    ("backend", "each"),
    [
        ("gradwire", ["", "0"]),
        ("gradwire_gloo", ["1", ""]),
        ("gradwire_mpi", ["", "1"]),
        ("gradwire_shm", ["", ""]),
    ],
)
def test_several_hosts_need_the_consent_of_all_ranks(hosts, backend, each):
    if backend == "gradwire_mpi":
        pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    net = hosts(1, 1, own=NETWORK) if backend == "gradwire_shm" else hosts(1, 1)
    pending = [
        worker.start(make_group_by_torch, net.address(0), rank, 2, each[rank], backend)
        for rank, worker in enumerate(net.workers)
    ]
    refusing = ", ".join(str(rank) for rank in range(2) if each[rank] != "1")
    for one in pending:
        with pytest.raises(
            ProcessGroupError,
            match=rf"the failure detector connects them without .*insecure=True.*"
            rf"GRADWIRE_INSECURE=1 .* on every rank; not allowed by: rank {refusing}$",
        ):
            one.result()


def listening() -> set[str]:
    """Returns the addresses on which this process listens."""
    there = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]
    return {address.removeprefix("::ffff:") for address in there}


def make_engine(module: str, name: str, path: Path, rank: int) -> None:
    """Makes an engine without a group, which has no failure detector."""
    setup = Setup(
        store=FileStore(str(path)),
        rank=rank,
        size=2,
        timeout=60,
        device_type="cpu",
        global_ranks=(0, 1),
        group_name="engine",
    )
    getattr(importlib.import_module(f"gradwire.c10d.engines.{module}"), name)(setup)


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [("gloo", "GlooEngine", "Gloo"), ("mpi.engine", "MpiEngine", "MPI")],
)
def test_engines_need_the_consent_of_all_ranks(hosts, tmp_path, module, name, what):
    if what == "MPI":
        pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    net = hosts(1, 1)
    pending = [
        worker.start(make_engine, module, name, tmp_path / "store", rank)
        for rank, worker in enumerate(net.workers)
    ]
    for each in pending:
        with pytest.raises(ProcessGroupError, match=f"{what} connects them without .* by: rank 0, 1$"):
            each.result()
    assert everywhere(net.workers, listening) == [set(), set()]


def test_ranks_of_several_users_of_one_host_have_to_allow_it():
    root, nobody = (HostIdentity("memory", "network", user=user) for user in (0, 65534))
    assert not insecure_problem([root, root], "Gloo")
    problem = insecure_problem([root, nobody], "Gloo")
    assert "run as several users of one host (0, 65534), and Gloo connects them without" in problem
    allowing = [HostIdentity("memory", "network", insecure=True, user=user) for user in (0, 65534)]
    assert not insecure_problem(allowing, "Gloo")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_ranks_of_one_host_listen_on_loopback_only(hosts, backend):
    """Also if the environment names an interface, as it may for other programs."""
    if backend == "mpi":
        pytest.importorskip("mpi4py", reason="the extra `mpi` is not installed")
    net = hosts(2)
    pending = [
        each.start(make_group_at_loopback, backend, rank, 2, {"GLOO_SOCKET_IFNAME": "eth0"})
        for rank, each in enumerate(net.workers)
    ]
    for each in pending:
        each.result()
    assert everywhere(net.workers, exchange) == [True, True]
    # MPI has no port there; rank 0 has that of PMI.
    assert everywhere(net.workers, listening) == [{"127.0.0.1"}, {"127.0.0.1"} if backend == "gloo" else set()]


def make_group_at_loopback(backend: str, rank: int, size: int, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    c10d.init_process_group(backend, f"tcp://127.0.0.1:{PORT}", world_size=size, rank=rank, timeout=60)


def test_the_variable_is_0_or_1(monkeypatch):
    monkeypatch.setenv("GRADWIRE_INSECURE", "yes")
    with pytest.raises(ValueError, match="GRADWIRE_INSECURE is 'yes': set it to 1, or to 0"):
        TCPStore("192.0.2.7", 29500)
    monkeypatch.setenv("GRADWIRE_INSECURE", "1")
    with pytest.raises(StoreError, match="must be an address of this machine"):
        TCPStore("192.0.2.7", 29500, is_master=True)


def test_the_interface_can_be_chosen(hosts):
    assert everywhere(make_group_on(hosts(1, 1), "gradwire", GLOO_SOCKET_IFNAME="eth0"), exchange) == [True, True]


def test_an_unknown_interface_is_an_error(hosts):
    with pytest.raises(ProcessGroupError, match="GLOO_SOCKET_IFNAME names .* 'eth7', .* one of lo, eth0"):
        make_group_on(hosts(1, 1), "gradwire", GLOO_SOCKET_IFNAME="eth7")


def test_an_address_of_one_link_is_told_to_nobody(monkeypatch):
    of_link = [SimpleNamespace(family=socket.AF_INET6, address="fe80::1%eth7")]
    whole = [*of_link, SimpleNamespace(family=socket.AF_INET6, address="2001:db8::7")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth7": of_link, "eth8": whole})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ProcessGroupError, match="'eth7', which has no such address .* one of eth8,"):
        addresses.address_for_others()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert addresses.address_for_others() == "2001:db8::7"


def say_name_of_host(names: str) -> None:
    with open("/etc/hosts", "a") as file:  # of this host only
        file.write(names)


def test_a_name_to_listen_on_need_not_be_known_elsewhere(hosts):
    net = hosts(1, 1)
    net.workers[0].run(say_name_of_host, f"127.0.1.1 trainer\n{net.address(0)} trainer\n")
    variables = ({"GRADWIRE_HOST": "trainer"}, {})
    making = [
        each.start(make_group, net.address(0), rank, 2, "gradwire", variables[rank])
        for rank, each in enumerate(net.workers)
    ]
    for pending in making:
        pending.result()
    assert everywhere(net.workers, exchange) == [True, True]


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("10.91.0.77", r"cannot listen \(Cannot assign requested address\): give an address of this machine"),
        ("no.such.name", "cannot listen .* cannot be resolved"),
        ("localhost", "which only processes of this host reach: give an address that the other hosts reach"),
    ],
)
def test_a_host_that_others_cannot_reach_is_an_error(hosts, host, problem):
    net = hosts(1, 1)
    making = [
        each.start(make_group, net.address(0), rank, 2, "gradwire", {"GRADWIRE_HOST": host})
        for rank, each in enumerate(net.workers)
    ]
    for pending in making:  # rank 0 listens, and tells the other ones
        with pytest.raises(ProcessGroupError, match=f"GRADWIRE_HOST is '{host}', .*{problem}"):
            pending.result()


def test_the_address_for_others(hosts):
    net = hosts(1)
    (worker,) = net.workers
    assert worker.run(addresses.address_for_others) == net.address(0)  # there is no default route
    net.add_route(0)
    assert worker.run(addresses.address_for_others) == net.address(0)
    net.ip(0, "link del eth0")
    assert worker.run(addresses.address_for_others) == addresses.LOOPBACK


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
