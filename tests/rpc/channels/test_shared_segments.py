"""broadcast_call to workers of one host: they receive a large tensor in one segment."""

import asyncio
import os

import pytest
import torch
from gradwire import rpc
from gradwire.errors import SendFailedError
from gradwire.rpc.channels import channels, segments
from gradwire.rpc.channels.base import SegmentLimit
from gradwire.rpc.channels.segments import MAX_SEGMENTS, Mapping, SegmentPool
from gradwire.rpc.requests import multi_sender

from tests import remote_functions
from tests.remote_functions import wait_until
from tests.rpc.channels.broadcasts import ONE_HOST, OTHERS, bytes_sent, each_result, group_count, ramp, total
from tests.rpc.channels.segments import (
    MIB,
    keep,
    kept_sums,
    mapped_files,
    memory,
    release_kept,
    used_bytes,
    write_to_all,
)
from tests.rpc.test_fault_injection import faulty
from tests.stopped import stopped


@pytest.fixture
def four(workers):
    """Four workers, of which the first is connected to the others."""
    started = workers.rpc(4, transports=ONE_HOST)
    started[0].run(each_result, OTHERS, os.getpid)
    return started


def free_shared_segments():
    return sum(len(free) for pool in memory()._pools.values() for free in pool._free.values())


def check_and_overwrite(tensor, value):
    """Returns whether all elements are `value`, and changes them."""
    found = bool((tensor == value).all())
    tensor.fill_(-1)
    return found


def check(tensor, value):
    return bool((tensor == value).all())


def keep_on(name, tensor):
    if rpc.get_worker_info().name == name:
        keep(tensor)


def test_a_tensor_is_in_one_segment_for_all(four):
    a, *others = four

    def send():
        tensor = ramp(4 * MIB)
        for _ in range(3):
            start = bytes_sent()
            assert each_result(OTHERS, total, (tensor,)) == [total(tensor)] * 3
            assert 16 * MIB < bytes_sent() - start < 16 * MIB + 10_000
            wait_until(lambda: free_shared_segments() == 1)
        assert used_bytes() == 16 * MIB
        assert group_count() == 0

    a.run(send)
    for worker in others:
        assert worker.run(mapped_files) == (1, 0)


def send_once(names):
    """Returns how many bytes a broadcast of 16 MiB sends, and the transports by which it went."""
    tensor, start = ramp(4 * MIB), bytes_sent()
    assert each_result(names, total, (tensor,)) == [total(tensor)] * len(names)
    return bytes_sent() - start, {rpc.debug_info()["transports"][name] for name in names}


def test_workers_are_connected_first(workers):
    a, *_ = workers.rpc(4, transports=ONE_HOST)
    a.run(setattr, multi_sender, "CONNECT_TIMEOUT_S", 1000)
    sent, transports = a.run(send_once, OTHERS)
    assert 16 * MIB < sent < 16 * MIB + 10_000
    assert transports == {"unix"}


def test_workers_that_cannot_be_connected_by_unix_sockets_are_sent_the_bytes(workers):
    started = workers(4)
    url = f"file://{workers.folder / 'rendezvous'}"

    def join(rank):
        options = rpc.RpcBackendOptions(init_method=url, transports=("grpc",) if rank else ONE_HOST)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=4, rpc_backend_options=options)

    for pending in [worker.start(join, rank) for rank, worker in enumerate(started)]:
        pending.result()
    started[0].run(setattr, multi_sender, "CONNECT_TIMEOUT_S", 1000)  # there is nothing to wait for
    sent, transports = started[0].run(send_once, OTHERS)
    assert sent > 48 * MIB
    assert transports == {"grpc"}


def wait_for_kept():
    for hung in remote_functions.kept:
        assert hung.wait() == total(ramp())


def test_a_worker_that_does_not_connect_is_waited_for_once(workers):
    a, b, *_ = workers.rpc(4, transports=ONE_HOST)

    def send(timeout):
        multi_sender.CONNECT_TIMEOUT_S = timeout
        hung, *others = rpc.broadcast_call(OTHERS, total, (ramp(),))
        assert [future.wait() for future in others] == [total(ramp())] * 2
        remote_functions.kept.append(hung)

    with stopped(b):
        a.run(send, 0.1)
        a.run(send, 1000)
    a.run(wait_for_kept)


def test_an_event_loop_does_not_wait_for_connections(workers):
    a, b, *_ = workers.rpc(4, transports=ONE_HOST)

    async def send():
        multi_sender.CONNECT_TIMEOUT_S = 1000
        hung, *others = rpc.broadcast_call(OTHERS, total, (ramp(),))
        assert [await future for future in others] == [total(ramp())] * 2
        remote_functions.kept.append(hung)

    with stopped(b):
        a.run(lambda: asyncio.run(send()))
    a.run(wait_for_kept)


def test_receivers_write_to_memory_of_their_own(four):
    def send():
        for number in range(6):
            function = check_and_overwrite if number % 3 else check
            tensor = torch.full((MIB,), float(number))
            assert each_result(OTHERS, function, (tensor, number)) == [True] * 3
            assert check(tensor, number)
            wait_until(lambda: free_shared_segments() == 1)
        assert used_bytes() == 4 * MIB

    a, b, *others = four
    a.run(send)
    a.run(each_result, OTHERS, keep, (torch.ones(MIB),))
    b.run(write_to_all)
    assert b.run(kept_sums) == [2 * MIB]
    for other in others:
        assert other.run(kept_sums) == [MIB]


def test_a_segment_is_used_again_when_all_have_given_it_back(four):
    a, b, *_ = four

    def send(value):
        each_result(OTHERS, keep_on, ("worker1", torch.full((MIB,), value)))

    a.run(send, 1.0)
    a.run(send, 2.0)
    assert b.run(kept_sums) == [1.0 * MIB, 2.0 * MIB]
    assert a.run(used_bytes) == 8 * MIB
    assert a.run(free_shared_segments) == 0
    b.run(write_to_all)
    b.run(release_kept, 1)
    a.run(wait_until, lambda: free_shared_segments() == 1)
    a.run(send, 3.0)
    assert a.run(used_bytes) == 8 * MIB
    assert b.run(kept_sums) == [2.0 * MIB, 3.0 * MIB]


def add_one_on(name, tensor):
    if rpc.get_worker_info().name == name:
        tensor.add_(1)


def test_a_receiver_that_writes_gets_copies(four):
    a, b, *_ = four

    def send(value, function):
        each_result(OTHERS, function, ("worker1", torch.full((MIB,), value)))
        wait_until(lambda: free_shared_segments() == 1)

    a.run(send, 1.0, add_one_on)
    for value in (2.0, 3.0):
        a.run(send, value, keep_on)
    b.run(write_to_all)
    assert b.run(kept_sums) == [3.0 * MIB, 4.0 * MIB]
    assert a.run(used_bytes) == 4 * MIB


def test_a_receiver_that_is_killed_has_given_back_what_it_had(four):
    a, b, c, d = four

    def send(names, function, *args):
        return each_result(names, function, (*args, torch.full((MIB,), 5.0)))

    a.run(send, OTHERS, keep_on, "worker1")
    a.run(send, OTHERS, keep_on, "worker2")
    b.kill()
    a.run(wait_until, lambda: free_shared_segments() == 1)
    assert a.run(send, OTHERS[1:], total) == [5.0 * MIB] * 2
    c.run(write_to_all)
    assert c.run(kept_sums) == [6.0 * MIB]
    for worker in (c, d):
        worker.kill()
    a.run(wait_until, lambda: used_bytes() == 0)


def test_what_is_received_outlives_the_sender(four):
    a, b, *_ = four
    a.run(each_result, OTHERS, keep, (torch.full((MIB,), 5.0),))
    a.kill()
    b.run(write_to_all)
    assert b.run(kept_sums) == [6.0 * MIB]
    b.run(release_kept)
    b.run(wait_until, lambda: mapped_files() == (0, 0))


def broadcast_with_a_loss(names):
    """Broadcasts, while one of the messages is not sent."""
    first, *others = rpc.broadcast_call(names, total, (ramp(),))
    with pytest.raises(SendFailedError, match="'worker1'"):
        first.wait()
    assert [future.wait() for future in others] == [total(ramp())] * 2
    wait_until(lambda: free_shared_segments() == 1)


def test_a_message_that_is_not_sent_gives_its_part_back(workers):
    started = faulty(workers, 4, messages_to_fail=["CALL"], num_fail_sends=1, transports=ONE_HOST)

    def connect():
        for name in OTHERS:
            rpc.remote(name, os.getpid).to_here()

    started[0].run(connect)
    started[0].run(broadcast_with_a_loss, OTHERS)


def test_beyond_the_limit_each_worker_is_sent_the_bytes(workers):
    started = workers.rpc(4, transports=ONE_HOST, channels=rpc.ChannelOptions(max_shared_bytes=4 * MIB))

    def send():
        each_result(OTHERS, os.getpid)
        assert each_result(OTHERS, total, (ramp(),)) == [total(ramp())] * 3
        assert used_bytes() == 0

    started[0].run(send)


def set_idle_timeout(seconds):
    channels.IDLE_TIMEOUT_S = seconds


def test_idle_segments_are_dropped_by_all(workers):
    started = workers(4)
    workers.each(started, set_idle_timeout, 0.2)
    workers.join_rpc(started, transports=ONE_HOST)

    def send():
        each_result(OTHERS, os.getpid)
        each_result(OTHERS, total, (ramp(),))
        wait_until(lambda: used_bytes() == 0 and not memory()._pools)

    for _ in range(2):
        started[0].run(send)
        for worker in started:
            worker.run(wait_until, lambda: mapped_files() == (0, 0))


def test_a_segment_has_several_holders():
    limit = SegmentLimit(1 << 20, MAX_SEGMENTS)
    pool = SegmentPool(limit, ["one", "other"])
    first, _ = pool.put(memoryview(b"abc"))
    pool.take_back("one", [first.number])
    pool.take_back("one", [first.number])
    second, is_new = pool.put(memoryview(b"def"))
    assert is_new
    pool.take_back("other", [first.number])
    assert pool.put(memoryview(b"ghi")) == (first, False)
    pool.remove_receiver("one")
    pool.take_back("other", [first.number, second.number])
    third, is_new = pool.put(memoryview(b"jkl"))
    assert not is_new
    pool.take_back("other", [third.number])
    pool.remove_idle()
    assert len(pool.remove_idle()) == 2
    assert limit.used == 0
    pool.remove_receiver("other")
    assert pool.put(memoryview(b"mno")) is None
    for segment in (first, second):
        os.close(segment.descriptor)


@pytest.mark.parametrize("is_told", [True, False])
def test_what_is_written_to_a_private_mapping_is_discarded(is_told, monkeypatch):
    if not is_told:

        def refuse(*_args, **_options):
            raise PermissionError

        monkeypatch.setattr(segments, "open", refuse, raising=False)
    descriptor = os.memfd_create("private")
    size = 3 * segments.mmap.PAGESIZE
    os.write(descriptor, b"a" * size)
    private = Mapping(descriptor, size, private=True)
    shown = memoryview(private.buffer()).cast("B")
    assert private.discard_writes() is not is_told
    for position in (0, size - 1):
        shown[position] = ord("b")
        os.pwrite(descriptor, b"c" * size, 0)
        assert shown[position] == ord("b")
        assert private.discard_writes()
        assert bytes(shown) == b"c" * size
    os.close(descriptor)
