"""Networks between simulated hosts fail for a while: who was cut off comes back, and only calls are lost."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradwire import Outcome, rpc
from gradwire.errors import WorkerLostError, WorkerSuspectError

from tests import remote_functions
from tests.hosts import Network
from tests.remote_functions import add, assert_clean, keep, wait_until
from tests.rpc.peers import links
from tests.rpc.peers.links import LIVENESS

SHORT = replace(LIVENESS, lease=2.0)

CUTS: dict[str, tuple[Callable[[Network], Any], Callable[[Network], Any]]] = {
    "both ways": (
        lambda net: (net.block(0, 1), net.block(1, 0)),
        lambda net: (net.unblock(0, 1), net.unblock(1, 0)),
    ),
    "from the caller": (lambda net: net.block(0, 1), lambda net: net.unblock(0, 1)),
    "to the caller": (lambda net: net.block(1, 0), lambda net: net.unblock(1, 0)),
    "a link": (lambda net: net.unplug(1), lambda net: net.plug(1)),
}


def start(net: Network, liveness: rpc.Liveness) -> None:
    starting = [
        member.start(join, rank, len(net.workers), net.address(0), liveness)
        for rank, member in enumerate(net.workers)
    ]
    for each in starting:
        each.result()


def join(rank: int, size: int, store: str, liveness: rpc.Liveness) -> None:
    options = rpc.RpcBackendOptions(init_method=f"tcp://{store}:29500", insecure=True, liveness=liveness)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def begin() -> None:
    """Makes a value on worker1, and begins a call."""
    links.record_events()
    keep(rpc.remote("worker1", torch.ones, (3,)))
    assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
    links.call_for_ever("worker1")


def when_suspect() -> None:
    links.assert_silent(links.futures.pop())
    with pytest.raises(WorkerSuspectError) as caught:
        rpc.rpc_sync("worker1", add, (1, 1))
    assert caught.value.outcome is Outcome.NOT_SENT
    wait_until(lambda: links.seen == [("suspect", "worker1")])


def when_back() -> None:
    wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])
    assert torch.equal(remote_functions.kept[-1].to_here(), torch.ones(3))
    remote_functions.kept.clear()
    links.seen.clear()
    rpc.rpc_sync("worker1", remote_functions.set_event, ("never",))


@pytest.mark.parametrize("cut", CUTS)
def test_a_partition_costs_calls_and_no_references(hosts, cut):
    net = hosts(1, 1, 1)
    start(net, LIVENESS)
    first, second, third = net.workers
    part, heal = CUTS[cut]
    first.run(begin)
    part(net)
    first.run(when_suspect)
    assert first.run(rpc.rpc_sync, "worker2", add, (1, 2)) == 3
    heal(net)
    first.run(when_back)
    assert second.run(rpc.rpc_sync, "worker0", add, (1, 2)) == 3
    for worker in (first, second, third):
        worker.run(assert_clean)


def when_lost() -> None:
    links.assert_silent(links.futures.pop())
    wait_until(lambda: links.seen == [("suspect", "worker1"), ("left", "worker1")])
    with pytest.raises(WorkerLostError) as caught:
        rpc.rpc_sync("worker1", add, (1, 1))
    assert caught.value.outcome is Outcome.NOT_SENT


def test_a_silent_host_is_suspect_and_lost_after_the_lease(hosts):
    net = hosts(1, 1, 1)
    start(net, SHORT)
    first, _, third = net.workers
    first.run(begin)
    net.unplug(1)
    first.run(when_lost)
    assert first.run(rpc.rpc_sync, "worker2", add, (1, 2)) == 3
    assert third.run(rpc.rpc_sync, "worker0", add, (1, 2)) == 3
