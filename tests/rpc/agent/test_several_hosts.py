"""Workers on several hosts rendezvous by MASTER_ADDR and one option, or raise errors that name what is missing."""

import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gradwire import autograd, compat, rpc
from gradwire.errors import RendezvousError, RpcError
from gradwire.optim import DistributedOptimizer
from torch import distributed

from tests.hosts import NETWORK, Network
from tests.remote_functions import add, wait_until
from tests.workers import Pending, Worker

PORT = "29500"
LAUNCHED = Path(__file__).parents[2] / "compat" / "programs" / "launched.py"


def join(rank: int, size: int | None, variables: dict[str, str], **options: Any) -> None:
    os.environ.update(variables)
    settings = rpc.RpcBackendOptions(**{"init_timeout": 40, **options})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=settings)


def master(address: str) -> dict[str, str]:
    return {"MASTER_ADDR": address, "MASTER_PORT": PORT}


def join_all(
    members: Sequence[Worker], variables: dict[str, str], each: Sequence[dict[str, Any]] = (), **options: Any
) -> list[Pending[None]]:
    """Starts to join workers into a static group; `each` has further options of each worker."""
    further = each or [{}] * len(members)
    return [
        member.start(join, rank, len(members), variables, **options, **further[rank])
        for rank, member in enumerate(members)
    ]


def call(others: Sequence[str]) -> None:
    for other in others:
        assert rpc.rpc_sync(other, add, (1, 2)) == 3


def train(others: Sequence[str]) -> None:
    """Checks calls, references, a backward pass and an optimizer with parameters on other workers."""
    for other in others:
        assert rpc.rpc_sync(other, torch.sum, (torch.ones(2**20),)) == 2**20
    weights = [rpc.remote(other, torch.ones, (2,), {"requires_grad": True}) for other in others]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.5)
    with autograd.context() as context_id:
        loss = sum((weight.to_here() * 2).sum() for weight in weights)
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    assert all((weight.to_here() == 0).all() for weight in weights)


def call_all(members: Sequence[Worker], function: Callable[[Sequence[str]], None] = call) -> None:
    """Has every worker call all others, one after another."""
    for rank, member in enumerate(members):
        member.run(function, [f"worker{other}" for other in range(len(members)) if other != rank])


def listening() -> set[str]:
    """Returns the addresses on which this process listens."""
    there = [each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"]
    return {address.removeprefix("::ffff:") for address in there}


@pytest.mark.parametrize("counts", [(1, 1), (2, 1, 1)])
def test_the_address_of_rank_0_and_one_option_are_enough(hosts, counts):
    net: Network = hosts(*counts)
    for each in join_all(net.workers, master(net.address(0)), insecure=True):
        each.result()
    call_all(net.workers, train)
    assert net.hosts[-1][0].run(listening) == {net.address(len(counts) - 1)}


def test_workers_of_one_host_listen_on_no_port(hosts):
    net = hosts(2)
    for each in join_all(net.workers, master(net.address(0)), insecure=True):
        each.result()
    call_all(net.workers)
    assert net.workers[1].run(listening) == set()


def same_error(pending: Sequence[Pending[None]]) -> str:
    """Returns the text of the error that all workers raise."""
    texts = set()
    for each in pending:
        with pytest.raises(RendezvousError) as caught:
            each.result()
        texts.add(str(caught.value))
    (text,) = texts
    return text


def test_without_the_option_the_error_names_it(hosts):
    net = hosts(1, 1)
    fix = r"pass rpc_backend_options=rpc.RpcBackendOptions\(insecure=True\) to init_rpc"
    for each in join_all(net.workers, master(net.address(0))):
        with pytest.raises(RendezvousError, match=f"'10.91.0.1' is refused.* {fix}"):
            each.result()


@pytest.mark.parametrize("own", [NETWORK, None], ids=["containers", "hosts"])
def test_rendezvous_by_a_file_between_hosts(hosts, own, tmp_path):
    net = hosts(1, 1) if own is None else hosts(1, 1, own=own)
    url = f"file://{tmp_path}/rendezvous"
    text = same_error(join_all(net.workers, {}, init_method=url))
    for rank in range(2):
        assert f"'worker{rank}' (rank {rank}, process {net.workers[rank].pid} on host{rank}) on unix:/" in text
    assert "pass rpc_backend_options=rpc.RpcBackendOptions(insecure=True)" in text
    for each in join_all(net.workers, {}, init_method=url, insecure=True):  # the same processes may try again
        each.result()
    call_all(net.workers)


def test_an_unreachable_member_is_named(hosts, tmp_path):
    net = hosts(1, 1, 1)
    each = [{"insecure": True}, {}, {"insecure": True}]
    text = same_error(join_all(net.workers, {}, each, init_method=f"file://{tmp_path}/rendezvous"))
    assert f"only: 'worker1' (rank 1, process {net.workers[1].pid} on host1) on unix:/" in text


def test_all_workers_learn_of_a_host_that_is_not_an_address_of_its_machine(hosts):
    net = hosts(1, 1)
    pending = join_all(net.workers, master(net.address(0)), insecure=True, host=net.address(0))
    with pytest.raises(
        RpcError, match=r"host is '10.91.0.1', where this worker cannot listen \(Cannot assign requested address\)"
    ):
        pending[1].result()
    with pytest.raises(
        RendezvousError, match=r"'worker1' \(rank 1, .* on host1\) cannot start: host is '10.91.0.1'"
    ):
        pending[0].result()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "address"])
def test_a_host_may_be_given(hosts, host):
    net = hosts(1, 1)
    each = [{"host": net.address(number) if host == "address" else host} for number in range(2)]
    for pending in join_all(net.workers, master(net.address(0)), each, insecure=True):
        pending.result()
    call_all(net.workers)


def add_names(folder: Path, net: Network, names: dict[str, str]) -> None:
    """Adds names to the hosts files of all hosts."""
    for number in range(len(net.hosts)):
        with (folder / f"hosts-host{number}").open("a") as file:
            file.writelines(f"{address} {name}\n" for name, address in names.items() if name != f"host{number}")


def test_a_name_that_is_the_loopback_address_on_its_own_host(hosts, tmp_path):
    net = hosts(2, 1)
    add_names(tmp_path, net, {"host0": net.address(0)})
    for each in join_all(net.workers, master("host0"), insecure=True):
        each.result()
    call_all(net.workers)


def test_a_name_of_several_addresses(hosts, tmp_path):
    net = hosts(1, 1)
    add_names(tmp_path, net, {"rendezvous": net.address(0), "mine": "127.0.0.1"})
    add_names(tmp_path, net, {"mine": "10.91.0.77"})
    each = [{}, {"host": "mine"}]
    net.ip(1, "addr add 10.91.0.77/24 dev eth0")
    for pending in join_all(net.workers, master("rendezvous"), each, insecure=True):
        pending.result()
    call_all(net.workers)
    assert net.workers[1].run(listening) == {"10.91.0.77"}


def test_ipv6(hosts):
    net = hosts(1, 1)
    for number in range(2):
        net.ip(number, f"addr add fd91::{number + 1}/64 dev eth0 nodad")
    for each in join_all(net.workers, {}, init_method=f"tcp://[fd91::1]:{PORT}", insecure=True):
        each.result()
    call_all(net.workers)
    assert net.workers[1].run(listening) == {"fd91::2"}


def test_a_dynamic_group(hosts):
    net = hosts(1, 1, 1)
    for rank, worker in enumerate(net.workers):
        worker.run(join, rank, None, master(net.address(0)), insecure=True)
    call_all(net.workers)
    net.workers[2].run(rpc.shutdown)
    call_all(net.workers[:2])


def test_a_worker_that_cannot_reach_a_dynamic_group_does_not_join(hosts, tmp_path):
    net = hosts(2, 1)
    url = f"file://{tmp_path}/rendezvous"
    a, b, c = net.workers
    a.run(join, 0, None, {}, init_method=url)
    with pytest.raises(
        RendezvousError, match=r"only: 'worker0' \(rank 0, .* on host0\) on unix:/.*[.] On every worker"
    ):
        c.run(join, 2, None, {}, init_method=url, insecure=True)
    b.run(join, 1, None, {}, init_method=url)
    call_all([a, b])


def test_under_torchrun(hosts):
    net = hosts(1, 1)
    net.workers[0].run(host_launcher_store)
    variables = {**master(net.address(0)), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for each in join_all(net.workers, variables, insecure=True):
        each.result()
    call_all(net.workers)


launcher_store: list[distributed.Store] = []


def host_launcher_store() -> None:
    launcher_store.append(distributed.TCPStore("0.0.0.0", int(PORT), is_master=True, wait_for_workers=False))


def hosts_store(worker: Worker) -> bool:
    """Returns whether a process on a worker's host listens on the port of the store."""
    sockets = "".join(Path(f"/proc/{worker.pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
    return re.search(rf":{int(PORT):04X} \S+ 0A ", sockets) is not None


def test_all_workers_learn_of_rank_0_on_two_hosts(hosts):
    net = hosts(1, 1, 1)
    pending = [net.workers[0].start(join, 0, 3, master(net.address(0)), insecure=True)]
    wait_until(lambda: hosts_store(net.workers[0]))  # the other rank 0 looks for it for a second
    pending += [
        net.workers[host].start(join, rank, 3, master(net.address(0)), insecure=True)
        for host, rank in ((1, 1), (2, 0))
    ]
    pids = [worker.pid for worker in net.workers]
    text = same_error(pending)
    assert "two workers have rank 0: " in text
    assert f"process {pids[0]} on host0" in text
    assert f"process {pids[2]} on host2" in text


def run_program(rank: int, variables: dict[str, str], *, insecure: bool = False) -> str:
    """Runs a program for torch.distributed.rpc on gradwire; returns its output."""
    os.environ.update(variables, RANK=str(rank))
    with redirect_stdout(StringIO()) as output:
        compat.install(insecure=insecure)
        try:
            runpy.run_path(str(LAUNCHED), run_name="__main__")
        finally:
            compat.uninstall()
    return output.getvalue()


def test_an_unmodified_program_for_torch(hosts):
    net = hosts(1, 1)
    variables = {**master(net.address(0)), "WORLD_SIZE": "2"}
    started = [worker.start(run_program, rank, variables) for rank, worker in enumerate(net.workers)]
    assert "start the program by `gradwire run --insecure`" in same_error(started)
    variables["MASTER_PORT"] = "29501"
    started = [
        worker.start(run_program, rank, variables, insecure=True) for rank, worker in enumerate(net.workers)
    ]
    assert [each.result() for each in started] == [
        f"worker{rank}: True gradwire.rpc.calls.sending\n" for rank in range(2)
    ]


def run_example(rank: int, variables: dict[str, str]) -> str:
    from examples import parameter_server  # imports scikit-learn: 0.7 s in each worker of this module

    os.environ.update(variables, RANK=str(rank))
    sys.argv = ["parameter_server.py", "--epochs", "1", "--quiet", "--insecure"]
    torch.set_num_threads(1)
    with redirect_stdout(StringIO()) as output:
        parameter_server.main()
    return output.getvalue()


def test_the_parameter_server(hosts):
    net = hosts(2, 1)
    variables = {**master(net.address(0)), "WORLD_SIZE": "3"}
    started = [worker.start(run_example, rank, variables) for rank, worker in enumerate(net.workers)]
    coordinator, *_ = [each.result() for each in started]
    assert "epoch  1   loss" in coordinator
