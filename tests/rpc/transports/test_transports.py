"""What carries the messages between two workers: sockets where they can be connected, else the gRPC stream."""

import asyncio
import os
import random
import signal
import socket
import time

import pytest
import torch
from gradwire import rpc
from gradwire.errors import WorkerLostError
from gradwire.rpc.transports import sockets

from tests.remote_functions import identity, wait_until
from tests.rpc.channels.segments import network
from tests.rpc.execution.interruption import ctrl_c_within
from tests.stopped import stopped


def transport_to(name):
    rpc.rpc_sync(name, os.getpid)
    return rpc.debug_info()["transports"][name]


@pytest.mark.parametrize(
    ("mine", "theirs", "used"),
    [
        (("unix", "tcp", "grpc"), ("unix", "tcp", "grpc"), "unix"),
        (("tcp", "grpc"), ("tcp", "grpc"), "tcp"),
        (("grpc",), ("grpc",), "grpc"),
        (("grpc",), ("unix", "tcp", "grpc"), "grpc"),
        (("unix", "tcp", "grpc"), ("grpc",), "grpc"),
    ],
)
def test_workers_use_what_both_allow(workers, mine, theirs, used):
    started = workers(2)
    folder = workers.folder

    def join(rank, transports):
        options = rpc.RpcBackendOptions(init_method=f"file://{folder / 'rendezvous'}", transports=transports)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    pending = [w.start(join, rank, (mine, theirs)[rank]) for rank, w in enumerate(started)]
    for p in pending:
        p.result()
    assert started[0].run(transport_to, "worker1") == used
    assert started[1].run(transport_to, "worker0") == used


def hold_up_a_nonce() -> None:
    """Has the first connection to this worker closed because it has not said its nonce in time."""
    sockets.NONCE_TIMEOUT_S = 0.5
    receive = sockets._receive

    async def receive_late(*args: object) -> bytes:
        sockets._receive = receive
        await asyncio.sleep(60)
        return b""

    sockets._receive = receive_late


def wait_less_for_a_nonce() -> None:
    sockets.NONCE_TIMEOUT_S = 0.5


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_socket_is_dialed_again_if_a_worker_was_held_up(workers, kind):
    """As a busy machine may: gRPC would carry all calls of the two workers from then on."""
    a, b = workers.rpc(2, transports=(kind, "grpc"))
    a.run(wait_less_for_a_nonce)
    b.run(hold_up_a_nonce)
    assert a.run(transport_to, "worker1") == kind


def test_a_worker_reaches_itself_without_a_socket(two_workers):
    assert two_workers[0].run(transport_to, "worker0") == "loopback"


@pytest.mark.parametrize("transports", [("tcp", "grpc"), ("grpc",), ("unix", "grpc")])
def test_calls_of_all_sizes(workers, transports):
    a, _ = workers.rpc(2, transports=transports)

    def check():
        for size in (0, 1, 1000, 100_000, 10_000_000):
            x = torch.arange(size, dtype=torch.uint8)
            assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)
        many = [torch.full((100,), float(index)) for index in range(3000)]
        received = rpc.rpc_sync("worker1", identity, (many,))
        assert all(map(torch.equal, received, many))
        futures = [rpc.rpc_async("worker1", identity, (index,)) for index in range(1000)]
        assert [future.wait() for future in futures] == list(range(1000))

    a.run(check)


calls = []
"""Futures that a worker keeps from one step of a test to the next."""


def call_stopped_and_running():
    data = bytes(100_000)
    calls.extend(rpc.rpc_async("worker1", len, (data,), timeout=0) for _ in range(200))
    for _ in range(100):
        assert rpc.rpc_sync("worker2", len, (data,)) == len(data)
    assert not calls[-1].done()


def call_for_long():
    calls.append(rpc.rpc_async("worker1", time.sleep, (60,)))
    rpc.rpc_sync("worker1", os.getpid)


def results():
    return [future.wait() for future in calls]


def test_a_stopped_peer_holds_up_nobody_else(three_workers):
    a, b, _ = three_workers
    a.run(transport_to, "worker1")
    with stopped(b):
        a.run(call_stopped_and_running)
    assert a.run(results) == [100_000] * 200


def test_a_killed_peer_is_lost_at_once(two_workers):
    a, b = two_workers
    a.run(call_for_long)
    b.kill()
    with pytest.raises(WorkerLostError, match="'worker1' is lost"):
        a.run(results)


begun: list[int] = []
"""What calls of `begin` have been given."""


def begin(index: int) -> int:
    begun.append(index)
    return index


def die_when_all_are_answered(count: int) -> None:
    """Kills this process once `begin` has run for each of the other calls, and they have been answered."""
    wait_until(lambda: len(begun) == count and rpc.debug_info()["agent.server_active_calls"] == 1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_answers_that_were_sent_before_a_death_arrive(two_workers):
    def call():
        futures = [rpc.rpc_async("worker1", begin, (index,)) for index in range(100)]
        last = rpc.rpc_async("worker1", die_when_all_are_answered, (len(futures),))
        assert [future.wait() for future in futures] == list(range(100))
        with pytest.raises(WorkerLostError):
            last.wait()

    two_workers[0].run(call)


def test_a_stranger_is_shut_out(two_workers):
    a, _ = two_workers
    a.run(transport_to, "worker1")
    address = next(address for worker in two_workers if (address := worker.run(_address_if_listening)) is not None)
    connections = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    silent, wrong, _ = connections
    for connection in connections:
        connection.settimeout(60)
        connection.connect(address)
    wrong.sendall(bytes(32))
    assert wrong.recv(1) == b""
    assert silent.recv(1) == b""  # after two seconds
    for connection in connections:
        connection.close()
    assert a.run(transport_to, "worker1") == "unix"


def _address_if_listening():
    listeners = network()._sockets._listeners
    return listeners["unix"].getsockname() if listeners else None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_shut_out(two_workers, workers):
    a, _ = two_workers
    a.run(transport_to, "worker1")
    address = next(address for worker in two_workers if (address := worker.run(_address_if_listening)) is not None)
    (stranger,) = workers(1)
    assert stranger.run(connect_as_nobody, address) == b""


def connect_as_nobody(address):
    os.seteuid(65534)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(address)
        return connection.recv(1)


@pytest.mark.parametrize("transports", [(), "grpc", ("unix",), ("grpc", "carrier pigeon"), None, 3])
def test_unknown_transports_are_refused(transports):
    with pytest.raises(ValueError, match="transports is"):
        rpc.RpcBackendOptions(transports=transports)


def call_and_interrupt(rounds):
    """Interrupts the main thread at random moments while it sends; returns how often."""
    chance, interrupts = random.Random(0), 0
    for number in range(rounds):
        try:
            with ctrl_c_within(0.002, chance):
                while True:
                    rpc.rpc_async("worker1", len, (bytes(chance.randrange(20_000)),))
        except KeyboardInterrupt:
            interrupts += 1
        assert rpc.rpc_sync("worker1", identity, (number,)) == number
    return interrupts


def test_ctrl_c_while_sending_leaves_the_connection_whole(workers):
    a, _ = workers.rpc(2)
    assert a.run(call_and_interrupt, 150) == 150
    assert a.run(transport_to, "worker1") == "unix"
