"""Links whose round trips take longer than strangers have to show who they are."""

import secrets

import torch
from gradwire import rpc
from gradwire.c10d import Credentials
from gradwire.rpc.peers import link
from gradwire.rpc.transports import sockets

from tests.remote_functions import add, wait_until
from tests.rpc.agent.test_several_hosts import join_all, master
from tests.rpc.peers import links
from tests.rpc.peers.links import LIVENESS

ROUND_TRIP_S = 0.6


def hurry() -> None:
    """Has this worker wait for less than a round trip, as its limits have it on a link of some seconds."""
    sockets.NONCE_TIMEOUT_S = link.PROBE_TIMEOUT_S = ROUND_TRIP_S / 2
    sockets.CONNECT_TIMEOUT_S = ROUND_TRIP_S


def call() -> None:
    """Checks that small and large messages take the same ways as on a fast link."""
    links.record_events()
    assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
    assert rpc.debug_info()["transports"]["worker1"] == "tcp"
    assert rpc.rpc_sync("worker1", torch.numel, (torch.ones(3 << 17),)) == 3 << 17
    wait_until(lambda: rpc.debug_info()["channels"]["worker1"] == "bulk")
    assert not links.seen


def heal() -> None:
    """Checks that a connection that breaks is made again."""
    links.cut(1)
    wait_until(lambda: links.seen == [("suspect", "worker1"), ("back", "worker1")])
    assert rpc.rpc_sync("worker1", add, (1, 1)) == 2


def test_a_round_trip_may_take_longer_than_a_stranger_has(hosts):
    """It takes some seconds, in which this test waits for some twenty round trips."""
    net = hosts(1, 1)
    a, b = net.workers
    credentials = Credentials(token=secrets.token_hex(32))
    for pending in join_all(net.workers, master(net.address(0)), liveness=LIVENESS, credentials=credentials):
        pending.result()
    for worker in (a, b):
        worker.run(hurry)
    net.delay(1, ROUND_TRIP_S / 2)
    a.run(call)
    a.run(heal)
