"""Calls and losses between workers on several hosts."""

import pytest
import torch
from gradwire import rpc
from gradwire.errors import WorkerSuspectError

from tests.hosts import Network
from tests.remote_functions import add, identity, wait_for

MIB = 2**20


def start(name: str, rank: int, size: int, host: str, store: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"tcp://{store}:29500", host=host, insecure=True)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


def start_on(net: Network) -> None:
    """Makes a group of all workers."""
    started = []
    for host, members in enumerate(net.hosts):
        for member in members:
            arguments = (len(started), len(net.workers), net.address(host), net.address(0))
            started.append(member.start(start, f"worker{len(started)}", *arguments))
    for each in started:
        each.result()


def call_each(size: int) -> list[float]:
    """Returns the sum of a tensor, as computed by each of the other workers."""
    futures = rpc.broadcast_call(["worker1", "worker2"], torch.sum, (torch.ones(size),))
    return [future.wait().item() for future in futures]


def groups() -> int:
    return rpc.debug_info()["broadcast_groups"]


def test_calls_and_broadcasts_between_hosts(hosts):
    net = hosts(1, 1, 1)
    start_on(net)
    first, second, _ = net.workers
    assert first.run(rpc.rpc_sync, "worker1", add, (1, 2)) == 3
    assert second.run(rpc.rpc_sync, "worker2", identity, (torch.ones(MIB),)).sum() == MIB
    assert first.run(call_each, MIB) == [MIB, MIB]
    assert first.run(groups) == 1
    net.delay(2, 0.025)
    assert first.run(call_each, MIB) == [MIB, MIB]


def suspect_while_waiting_for(worker: str) -> str:
    with pytest.raises(WorkerSuspectError) as caught:
        rpc.rpc_sync(worker, wait_for, ("an event that nobody sets",), timeout=0)
    return caught.value.worker


def test_workers_of_a_host_that_vanishes_are_suspect(hosts):
    net = hosts(1, 1, 1)
    start_on(net)
    first = net.workers[0]
    assert first.run(rpc.rpc_sync, "worker2", add, (1, 2)) == 3
    waiting = first.start(suspect_while_waiting_for, "worker2")
    net.unplug(2)
    assert waiting.result() == "worker2"
    assert first.run(rpc.rpc_sync, "worker1", add, (1, 2)) == 3
