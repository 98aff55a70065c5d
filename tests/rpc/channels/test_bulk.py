"""Large payloads between workers that are connected by TCP go by connections of their own."""

import contextlib
import errno
import itertools
import os
import random
import signal
import socket
import threading

import pytest
import torch
from gradwire import autograd, rpc
from gradwire.errors import AnswerFailedError, RpcCancelledError, SendFailedError, WorkerLostError
from gradwire.rpc.channels import bulk as bulk_channel
from gradwire.rpc.channels import bulk_connections
from gradwire.rpc.channels.bulk_connections import PART_BYTES

from tests import remote_functions
from tests.remote_functions import identity, keep, process_id, wait_until
from tests.rpc.agent.test_several_hosts import join_all, master
from tests.rpc.channels.segments import channels_to
from tests.rpc.execution.interruption import ctrl_c_within
from tests.stopped import stopped

MIB = 1 << 20
TCP = ("tcp", "grpc")
GRPC = ("grpc",)
UNREAD = 24 * MIB
"""Numbers of 4 bytes: more than the buffers of all connections between two workers hold."""

THRESHOLD = 128 << 10

calls = []
"""Futures that a worker keeps from one step of a test to the next."""

held = []
"""Connections that are not read before `release`. Guarded by the lock."""

holding = threading.Lock()


def bulk(peer):
    """Returns this worker's bulk connections to another one, and from it."""
    return channels_to(peer).bulk


def channel_to(name):
    return rpc.debug_info()["channels"][name]


def connect(name):
    """Has this worker connect to another for large payloads, and that one to this one."""
    x = torch.ones(MIB)
    rpc.rpc_sync(name, process_id)
    assert torch.equal(rpc.rpc_sync(name, identity, (x,)), x)
    me = rpc.get_worker_info().name
    wait_until(lambda: channel_to(name) == rpc.rpc_sync(name, channel_to, (me,)) == "bulk")


def hold():
    """Has this worker read no bulk connection before `release`, as if the network were slow."""

    def read_later(connection):
        with holding:
            if bulk_connections._ReceivingConnection._read is read_later:
                held.append(connection)
                return False
        return _read(connection)

    bulk_connections._ReceivingConnection._read = read_later


def release():
    with holding:
        bulk_connections._ReceivingConnection._read = _read
        released = held.copy()
        held.clear()
    for connection in released:
        connection.resume()


_read = bulk_connections._ReceivingConnection._read


def cut_bulk_connections(peer):
    """Cuts the connections by which this worker sends, as a broken network does."""
    for connection in bulk(peer).sending._connections:
        with contextlib.suppress(OSError):  # the end of another one has closed it
            connection.socket.shutdown(socket.SHUT_RDWR)


def start_call(function, *args):
    calls.append(rpc.rpc_async("worker1", function, args))


def result_of_call():
    return calls.pop().wait()


@pytest.fixture
def pair(workers):
    """Two workers that are connected by TCP, also for large payloads."""
    a, b = workers.rpc(2, transports=TCP)
    a.run(connect, "worker1")
    return a, b


@pytest.mark.parametrize("connections", [1, 4])
def test_payloads_of_all_sizes(workers, connections):
    a, _ = workers.rpc(2, transports=TCP, channels=rpc.ChannelOptions(bulk_connections=connections))

    def check():
        connect("worker1")
        assert len(bulk(1).sending._connections) == connections
        for size in (1, THRESHOLD - 1, THRESHOLD, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 9 * PART_BYTES + 3):
            x = torch.randint(256, (size,), dtype=torch.uint8)
            assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)
        data = random.Random(0).randbytes(3 * MIB)
        assert rpc.rpc_sync("worker1", identity, (data,)) == data
        assert channel_to("worker1") == "bulk"

    a.run(check)


def echo_many(name, seed, rounds=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 100, 40_000, PART_BYTES // 4, PART_BYTES // 4 + 1, 600_000]
    tensors = [torch.rand(size, generator=generator) for size in sizes * 2]
    for _ in range(rounds):
        received = rpc.rpc_sync(name, identity, (tensors,))
        assert all(map(torch.equal, received, tensors))


def echo_in_threads(name):
    threads = [threading.Thread(target=echo_many, args=(name, seed, 2)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("connections", [1, 3])
def test_many_tensors_in_both_directions_at_once(workers, connections):
    a, b = workers.rpc(2, transports=TCP, channels=rpc.ChannelOptions(bulk_connections=connections))
    pending = [a.start(echo_in_threads, "worker1"), b.start(echo_in_threads, "worker0")]
    for p in pending:
        p.result()


def test_received_tensors_are_ordinary_ones(pair):
    """They can be written to and kept, and outlive their sender; others do not see what is written."""
    a, b = pair

    def fetch():
        x = torch.ones(MIB)
        y, z = (rpc.rpc_sync("worker1", identity, (x,)) for _ in range(2))
        y += 1
        y[:10].zero_()
        assert z.sum() == x.sum() == MIB
        remote_functions.kept.extend([y, z[5:7]])

    def check():
        y, z = remote_functions.kept
        assert y.sum() == 2 * MIB - 20
        assert z.tolist() == [1.0, 1.0]

    a.run(fetch)
    b.kill()
    a.run(wait_until, lambda: not bulk(1).sending and not bulk(1).receiving)
    a.run(check)


def test_nothing_is_received_into_memory_that_is_in_use(pair):
    a, b = pair

    def send():
        for number in range(12):
            rpc.rpc_sync("worker1", keep, (torch.full((MIB,), float(number)),))

    def values():
        kept = remote_functions.kept
        return [{tensor.min().item(), tensor.max().item()} for tensor in kept]

    a.run(send)
    assert b.run(values) == [{float(number)} for number in range(12)]


def test_small_calls_pass_large_tensors(pair):
    a, b = pair
    b.run(hold)

    def check():
        future = rpc.rpc_async("worker1", torch.sum, (torch.ones(UNREAD),))
        for _ in range(20):
            assert rpc.rpc_sync("worker1", process_id) != os.getpid()
        assert not future.done()
        rpc.rpc_sync("worker1", release)
        assert future.wait() == UNREAD

    a.run(check)


def test_a_backward_pass_with_large_gradients(pair):
    def check():
        x, y = (torch.rand(MIB, requires_grad=True) for _ in range(2))
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, (x, y)).sum()])
            gradients = autograd.get_gradients(context_id)
            assert torch.equal(gradients[x], y)
            assert torch.equal(gradients[y], x)

    pair[0].run(check)


# Where there are no bulk connections.


@pytest.mark.parametrize(
    ("mine", "theirs"), [(GRPC, GRPC), (TCP, GRPC), (GRPC, TCP)], ids=["neither", "the caller", "the callee"]
)
def test_without_tcp_large_payloads_go_in_chunks(workers, mine, theirs):
    started = workers(2)
    folder = workers.folder

    def join(rank, transports):
        options = rpc.RpcBackendOptions(init_method=f"file://{folder / 'rendezvous'}", transports=transports)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    for p in [w.start(join, rank, (mine, theirs)[rank]) for rank, w in enumerate(started)]:
        p.result()

    def check():
        for _ in range(3):
            x = torch.rand(MIB)
            assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)
        wait_until(lambda: not bulk(1)._attempt)
        assert channel_to("worker1") == rpc.rpc_sync("worker1", channel_to, ("worker0",)) == "chunked"

    started[0].run(check)


def test_on_one_host_shared_memory_is_preferred(workers):
    a, _ = workers.rpc(2, transports=("unix", "tcp", "grpc"))

    def check():
        x = torch.ones(MIB)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)
        assert torch.equal(rpc.rpc_sync("worker0", identity, (x,)), x)
        assert rpc.debug_info()["channels"] == {"worker0": "local", "worker1": "segment"}
        assert not bulk(1)._attempt
        assert not bulk(1).sending

    a.run(check)


def test_beyond_the_limit_of_shared_memory_bulk_connections_are_used(workers):
    channels = rpc.ChannelOptions(max_shared_bytes=MIB)
    a, _ = workers.rpc(2, transports=("unix", "grpc"), channels=channels)

    def check():
        rpc.rpc_sync("worker1", process_id)
        x = torch.rand(MIB)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)
        wait_until(lambda: bulk(1).is_connected)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)

    a.run(check)


def test_between_hosts(hosts):
    net = hosts(1, 1)
    for each in join_all(net.workers, master(net.address(0)), insecure=True):
        each.result()
    a, b = net.workers
    a.run(connect, "worker1")
    b.run(echo_many, "worker0", 0)


# When a connection breaks.


def test_a_request_whose_connection_breaks_fails_and_never_runs(pair):
    a, b = pair
    b.run(hold)

    def lose():
        future = rpc.rpc_async("worker1", keep, (torch.ones(UNREAD),))
        cut_bulk_connections(1)
        rpc.rpc_sync("worker1", release)
        with pytest.raises(SendFailedError, match="'worker1' could not be sent: its connection for large"):
            future.wait()

    a.run(lose)
    assert b.run(lambda: remote_functions.kept) == []
    a.run(echo_many, "worker1", 0)
    assert a.run(lambda: rpc.debug_info()["lost_workers"]) == {}


def test_an_answer_whose_connection_breaks_fails_the_call(pair):
    a, b = pair
    a.run(hold)
    a.run(start_call, torch.ones, UNREAD)
    b.run(wait_until, lambda: bulk(0).sending._payloads)
    b.run(cut_bulk_connections, 0)
    a.run(release)
    with pytest.raises(AnswerFailedError, match="'worker1' has run the call, but could not send the answer: its"):
        a.run(result_of_call)
    a.run(echo_many, "worker1", 0)


def test_malformed_bytes_cost_the_bulk_connections_only(pair):
    a, b = pair

    def spoil():
        bulk(1).sending._connections[0].socket.sendall(b"no header at all")
        wait_until(lambda: not bulk(1).sending)

    a.run(setattr, bulk_channel, "RETRY_AFTER_S", 1000.0)
    a.run(spoil)
    b.run(wait_until, lambda: not bulk(0).receiving)
    assert a.run(channel_to, "worker1") == "chunked"
    a.run(echo_many, "worker1", 0)


def test_broken_connections_are_made_again(workers):
    a, b = workers(2)

    def hurry():
        bulk_channel.RETRY_AFTER_S = 0.01

    workers.each([a, b], hurry)
    workers.join_rpc([a, b], transports=TCP)
    for _ in range(3):
        a.run(connect_again)
        a.run(cut_bulk_connections, 1)


def connect_again():
    def is_connected():
        with contextlib.suppress(SendFailedError):  # the broken connection was used
            rpc.rpc_sync("worker1", torch.sum, (torch.ones(MIB),))
        return channel_to("worker1") == "bulk"

    wait_until(is_connected)


def test_connections_are_made_again_that_ran_out_of_descriptors(workers):
    """The peer had no bulk connections any more after that, until it was lost."""
    a, b = workers(2)

    def run_out() -> None:
        bulk_channel.RETRY_AFTER_S = 0.01
        duplicate, number = os.dup, itertools.count()

        def fail_once(descriptor: int) -> int:
            if next(number) == 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return duplicate(descriptor)

        os.dup = fail_once

    a.run(run_out)
    workers.join_rpc([a, b], transports=TCP)
    a.run(connect_again)
    assert "Exception ignored" not in a.describe()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_peer_that_dies_in_the_middle_is_lost(pair, kill):
    a, b = pair
    b.run(hold)
    a.run(lambda: [start_call(torch.sum, torch.ones(UNREAD)) for _ in range(3)])
    os.kill(b.pid, kill)
    for _ in range(3):
        with pytest.raises(WorkerLostError, match="'worker1' is lost"):
            a.run(result_of_call)
    a.run(wait_until, lambda: not bulk(1).sending and not bulk(1).receiving)


def connections_received():
    return [len(each._connections) for each in list(bulk(0).receiving.values())]


def open_sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def test_no_descriptor_is_left_of_broken_connections(workers):
    a, b = workers(2)
    workers.each([a, b], lambda: setattr(bulk_channel, "RETRY_AFTER_S", 0.01))
    workers.join_rpc([a, b], transports=TCP, channels=rpc.ChannelOptions(bulk_connections=5))
    a.run(connect_again)
    b.run(wait_until, lambda: connections_received() == [5])  # which the other end may use before
    before = a.run(open_sockets), b.run(open_sockets)
    for _ in range(3):
        a.run(cut_bulk_connections, 1)
        a.run(connect_again)
    b.run(wait_until, lambda: connections_received() == [5])
    for worker, count in zip((a, b), before, strict=True):
        worker.run(wait_until, lambda count=count: open_sockets() <= count)


def test_a_cancelled_call_does_not_run_and_holds_up_none(pair):
    a, b = pair
    b.run(hold)

    def cancel():
        future = rpc.rpc_async("worker1", keep, (torch.ones(UNREAD),))
        assert future.cancel()
        with pytest.raises(RpcCancelledError):
            future.wait()
        rpc.rpc_sync("worker1", release)

    a.run(cancel)
    a.run(echo_many, "worker1", 0)
    assert b.run(lambda: remote_functions.kept) == []


def test_a_call_to_a_stopped_worker_is_withdrawn(workers):
    """Before there are connections, payloads wait in the queue of the chunks, and leave it with their envelope."""
    a, b = workers.rpc(2, transports=TCP)

    def cancel():
        future = rpc.rpc_async("worker1", keep, (torch.ones(MIB),))
        assert future.cancel()
        with pytest.raises(RpcCancelledError):
            future.wait()

    with stopped(b):
        a.run(cancel)
    a.run(echo_many, "worker1", 0)
    assert b.run(lambda: remote_functions.kept) == []


def test_workers_leave_while_payloads_travel(pair):
    a, b = pair
    b.run(hold)
    a.run(start_call, torch.sum, torch.ones(UNREAD))
    a.run(rpc.shutdown, graceful=False)
    b.run(rpc.shutdown, graceful=False)
    a.run(wait_until, lambda: threading.active_count() <= 2)


def call_and_interrupt(rounds):
    """Interrupts the main thread at random moments while it sends large payloads."""
    chance = random.Random(0)
    data = [chance.randbytes(nbytes) for nbytes in (THRESHOLD, 2 * THRESHOLD, MIB, 3 * MIB)]
    for _ in range(rounds):
        with contextlib.suppress(KeyboardInterrupt), ctrl_c_within(0.005, chance):
            while True:
                rpc.rpc_async("worker1", len, (chance.choice(data),))
        assert [rpc.rpc_sync("worker1", identity, (each,)) for each in data] == data


def test_ctrl_c_while_sending_leaves_the_connections_whole(pair):
    a, _ = pair
    a.run(call_and_interrupt, 60)
    assert a.run(channel_to, "worker1") == "bulk"
