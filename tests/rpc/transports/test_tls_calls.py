"""Workers with credentials: their calls and tensors go by TCP connections with TLS, as they do without."""

import concurrent.futures
import os
import time

import pytest
import torch
from gradwire import rpc
from gradwire.c10d import Credentials
from gradwire.rpc.transports.tls_socket import TlsSocket

from tests.remote_functions import identity, wait_until
from tests.rpc.agent.test_several_hosts import call_all, join_all, master, train
from tests.rpc.execution.test_waiting_threads import call_in_handler, nothing_is_pending, wait_and_interrupt
from tests.rpc.transports.test_transports import call_and_interrupt, network, transport_to
from tests.rpc.transports.tls_pairs import TOKEN

OPTIONS = {"transports": ("tcp", "grpc"), "credentials": Credentials(token=TOKEN)}
LARGE = 3 << 20
"""The number of floats of a tensor that bulk connections carry."""


@pytest.fixture
def pair(workers):
    """Two workers whose connection has TLS."""
    a, b = workers.rpc(2, **OPTIONS)
    assert a.run(rpc.rpc_sync, "worker1", os.getpid) == b.pid
    assert a.run(transport_to, "worker1") == "tcp"
    assert a.run(has_tls, 1)
    return a, b


def has_tls(peer: int) -> bool:
    return isinstance(network().peers.by_id[peer].transport.outbox.socket._connection, TlsSocket)


def bulk_has_tls(peer: int) -> bool:
    bundle = network().peers.by_id[peer].channels.bulk.sending
    return bundle is not None and all(isinstance(each.socket, TlsSocket) for each in bundle._connections)


def echo(worker: str, count: int, rounds: int = 1) -> bool:
    sent = [torch.arange(count, dtype=torch.float32) + number for number in range(rounds)]
    futures = [rpc.rpc_async(worker, identity, (each,)) for each in sent]
    received = [future.wait() for future in futures]
    for each in received:
        each += 1  # received tensors can be written to
    return all(torch.equal(a + 1, b) for a, b in zip(sent, received, strict=True))


def test_calls_and_tensors_of_all_sizes(pair):
    a, _ = pair
    for count in (1, 1000, 5000, 20_000, 100_000, LARGE):
        assert a.run(echo, "worker1", count)
    a.run(wait_until, lambda: bulk_has_tls(1))
    for count in (16_385, 262_144, 262_145, LARGE):
        assert a.run(echo, "worker1", count, 5)


def test_many_calls_at_once_in_both_directions(pair):
    a, b = pair
    assert a.run(echo, "worker1", LARGE)
    assert b.run(echo, "worker0", LARGE)

    def call(worker: str) -> int:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            large = [pool.submit(echo, worker, LARGE // 3, 4) for _ in range(2)]
            futures = [rpc.rpc_async(worker, identity, (number,)) for number in range(1000)]
            small = [pool.submit(echo, worker, 100, 100) for _ in range(2)]
            assert all(each.result() for each in large + small)
        return sum(future.wait() for future in futures)

    runs = [a.start(call, "worker1"), b.start(call, "worker0")]
    assert [run.result() for run in runs] == [499500, 499500]
    assert a.run(has_tls, 1)


def test_an_interrupted_wait_loses_no_answer(workers):
    a, *_ = workers.rpc(3, **OPTIONS)
    assert a.run(wait_and_interrupt, 300) == 300
    a.run(wait_until, nothing_is_pending)
    assert a.run(has_tls, 1)


def test_ctrl_c_while_sending_leaves_the_connection_whole(pair):
    a, _ = pair
    assert a.run(call_and_interrupt, 150) == 150
    assert a.run(has_tls, 1)


def test_a_signal_handler_may_call_the_worker_that_is_waited_for(pair):
    assert pair[0].run(call_in_handler, 10) == [f"handler {number}" for number in range(10)]


def test_a_worker_that_dies_is_noticed(pair):
    a, b = pair
    waiting = a.start(rpc.rpc_sync, "worker1", time.sleep, (60,))
    b.kill()
    with pytest.raises(Exception, match="worker1"):
        waiting.result()


def test_a_forked_child_leaves_the_connection_alone(pair):
    a, _ = pair

    def fork() -> int:
        child = os.fork()
        if not child:
            try:
                rpc.rpc_async("worker1", identity, (1,))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return rpc.rpc_sync("worker1", identity, (2,))

    assert a.run(fork) == 2


def test_workers_on_several_hosts(hosts):
    net = hosts(1, 1, 1)
    joining = join_all(net.workers, master(net.address(0)), credentials=Credentials(token=TOKEN))
    for each in joining:
        each.result()
    call_all(net.workers, train)
    a = net.workers[0]
    for peer in (1, 2):
        assert a.run(echo, f"worker{peer}", LARGE)
        assert a.run(has_tls, peer)
        a.run(wait_until, lambda peer=peer: bulk_has_tls(peer))
        assert a.run(echo, f"worker{peer}", LARGE, 4)
