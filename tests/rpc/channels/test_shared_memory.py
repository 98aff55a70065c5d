"""Large payloads between workers of one host are in shared memory, of which nothing is left."""

import errno
import fcntl
import gc
import os
import re
import resource
import struct
import subprocess
import threading

import pytest
import torch
from gradwire import rpc
from gradwire.errors import SendFailedError
from gradwire.rpc.channels import channels, segments
from gradwire.rpc.channels.base import SegmentLimit
from gradwire.rpc.channels.segments import MAX_SEGMENTS, SEALS, MappedSegments, Mapping, Segment, SegmentPool

from tests.hosts import MEMORY, separate, why_unavailable
from tests.remote_functions import identity, wait_until
from tests.rpc.channels.segments import (
    MIB,
    keep,
    kept,
    kept_sums,
    mapped_files,
    network,
    release_kept,
    segments_by_peer,
    segments_of,
    used_bytes,
    write_to_all,
)

F_SEAL_FUTURE_WRITE = 0x10


@pytest.fixture
def pair(two_workers):
    """Two workers, of which the first has called the second: so there is a socket."""
    two_workers[0].run(rpc.rpc_sync, "worker1", os.getpid)
    return two_workers


def fetch_and_write():
    x = torch.ones(MIB)
    y = rpc.rpc_sync("worker1", identity, (x,))
    z = rpc.rpc_sync("worker1", torch.clone, (x,))
    y += 1
    y[:10].zero_()
    assert z.sum() == MIB
    assert x.sum() == MIB
    kept.extend([y, z[5:7], y.view(-1, 4)[3]])


def test_large_tensors_are_in_segments_and_small_ones_are_not(pair):
    a, b = pair

    def check():
        for size in (1000, 32 * 1024, 100_000, 5 * MIB):
            x = torch.arange(size, dtype=torch.int32)
            before = used_bytes()
            assert torch.equal(rpc.rpc_sync("worker1", torch.neg, (x,)), -x)
            assert (used_bytes() > before) == (x.nbytes >= 32 * 1024 and size > 1000)

    a.run(check)
    assert b.run(used_bytes) > 0


def test_segments_are_used_again(pair):
    a, b = pair

    def many():
        x = torch.ones(MIB // 4)
        for _ in range(200):
            rpc.rpc_sync("worker1", identity, (x,))

    a.run(many)
    assert a.run(used_bytes) <= 16 * MIB
    assert b.run(used_bytes) <= 16 * MIB
    mapped, descriptors = a.run(mapped_files)
    assert mapped <= 32
    assert descriptors == 0


def add_up(tensors):
    return sum(tensor.sum().item() for tensor in tensors)


@pytest.mark.parametrize("function", [identity, add_up])
def test_segments_come_back_with_the_answer(pair, function):
    """So the next call finds them in the processor's cache."""

    def call():
        tensors = [torch.ones(MIB, dtype=torch.uint8), torch.ones(MIB // 8)]
        for _ in range(20):
            rpc.rpc_sync("worker1", function, (tensors,))
        assert used_bytes() == MIB + MIB // 2

    pair[0].run(call)


def test_received_tensors_are_ordinary_ones(pair):
    """They can be written to and kept, and outlive their sender; others do not see what is written."""
    a, b = pair
    a.run(fetch_and_write)
    b.kill()
    a.run(gc.collect)
    assert a.run(kept_sums)[1:] == [2.0, 8.0]
    a.run(release_kept)


def test_nothing_is_sent_through_a_segment_while_its_bytes_are_in_use(pair):
    a, b = pair

    def send(count):
        for number in range(count):
            rpc.rpc_sync("worker1", keep, (torch.full((MIB,), float(number)),))

    a.run(send, 20)
    assert b.run(kept_sums) == [float(number * MIB) for number in range(20)]
    assert a.run(used_bytes) >= 80 * MIB
    b.run(release_kept)


def test_beyond_the_limit_payloads_travel_as_between_hosts(workers):
    a, b = workers.rpc(2, channels=rpc.ChannelOptions(max_shared_bytes=4 * MIB))

    def send():
        rpc.rpc_sync("worker1", os.getpid)
        for number in range(8):
            rpc.rpc_sync("worker1", keep, (torch.full((MIB // 4,), float(number)),))
        x = torch.ones(2 * MIB)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)

    a.run(send)
    assert a.run(used_bytes) <= 4 * MIB
    assert b.run(kept_sums) == [float(number * MIB // 4) for number in range(8)]


def test_a_worker_that_accepts_less_refuses_the_payload(workers):
    a, _ = workers.rpc(2, channels=rpc.ChannelOptions(max_mapped_bytes=MIB))

    def send():
        rpc.rpc_sync("worker1", os.getpid)
        for _ in range(3):
            with pytest.raises(ValueError, match="in shared memory is refused: .* max_mapped_bytes is 1048576"):
                rpc.rpc_sync("worker1", identity, (torch.ones(MIB),))
        x = torch.ones(MIB // 8)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (x,)), x)
        wait_until(lambda: used_bytes() <= MIB)  # those that were refused are dropped

    a.run(send)


def fail_to_map():
    def fail(*args, **kwargs):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    segments.Mapping = fail


def map_again():
    segments.Mapping = Mapping


def test_segments_are_used_as_soon_as_there_is_memory_for_them(pair):
    """The receiver refused all payloads in one for ever, which the sender went on using."""
    a, b = pair

    def send():
        for _ in range(3):
            assert rpc.rpc_sync("worker1", torch.sum, (torch.ones(300_000),)) == 300_000

    def fail():
        with pytest.raises(ValueError, match="is refused: there is no memory"):
            rpc.rpc_sync("worker1", torch.sum, (torch.ones(300_000),))

    b.run(fail_to_map)
    for _ in range(2):
        a.run(fail)
    b.run(map_again)
    a.run(send)


def fetch_and_leave():
    kept.append(rpc.rpc_sync("worker1", torch.clone, (torch.full((MIB,), 2.0),)))
    rpc.shutdown()


def test_tensors_stay_after_shutdown(pair):
    a, b = pair
    ended = b.start(rpc.shutdown)
    a.run(fetch_and_leave)
    ended.result()
    a.run(gc.collect)
    assert a.run(kept_sums) == [2.0 * MIB]
    a.run(write_to_all)
    assert a.run(kept_sums) == [3.0 * MIB]


def sum_in_child(read_end, write_end):
    """Forks a child that sums the kept tensor when it is told to; returns the sum."""
    child = os.fork()
    if not child:
        os.read(read_end[0], 1)
        os.write(write_end[1], struct.pack("<d", kept[0][:100].sum()))  # OpenMP would not run after a fork
        os._exit(0)
    return child


def forked_child_keeps_its_tensors():
    kept.append(rpc.rpc_sync("worker1", torch.clone, (torch.full((MIB,), 2.0),)))
    go, told = os.pipe(), os.pipe()
    child = sum_in_child(go, told)
    release_kept()
    for number in range(5):  # which would be received into the same memory
        rpc.rpc_sync("worker1", torch.clone, (torch.full((MIB,), float(number)),))
    os.write(go[1], b"x")
    (found,) = struct.unpack("<d", os.read(told[0], 8))
    os.waitpid(child, 0)
    return found


def test_a_forked_child_keeps_the_tensors_that_it_has(pair):
    assert pair[0].run(forked_child_keeps_its_tensors) == 200.0


def test_idle_segments_are_dropped_by_both(workers):
    started = workers(2)
    workers.each(started, setattr_of_channel, 0.2)
    workers.join_rpc(started)
    a, _ = started
    a.run(rpc.rpc_sync, "worker1", os.getpid)
    a.run(lambda: rpc.rpc_sync("worker1", identity, (torch.ones(MIB),)).sum())
    for worker in started:
        worker.run(wait_until, lambda: used_bytes() == 0 and mapped_files() == (0, 0))
    assert a.run(lambda: rpc.rpc_sync("worker1", identity, (torch.ones(MIB),)).sum().item()) == MIB


def setattr_of_channel(seconds):
    channels.IDLE_TIMEOUT_S = seconds


unmapping_threads = []


def note_unmapping():
    """Has this worker note the threads that unmap segments."""
    unmap = Mapping.__del__

    def note_and_unmap(mapping):
        unmapping_threads.append(threading.current_thread().name)
        unmap(mapping)

    Mapping.__del__ = note_and_unmap


def assert_unmapped_by_executor():
    wait_until(lambda: mapped_files() == (0, 0))
    names = set(unmapping_threads)
    assert names
    assert all(re.fullmatch(r"gradwire-worker[01]-\d+", name) for name in names), names


@pytest.mark.parametrize("is_killed", [False, True], ids=["idle", "killed"])
def test_segments_are_unmapped_by_threads_of_the_executor(workers, is_killed):
    """It takes long. The event loop and the thread that reads a socket have other messages to handle."""
    a, b = started = workers(2)
    workers.each(started, setattr_of_channel, 1000.0 if is_killed else 0.2)
    workers.join_rpc(started)
    workers.each(started, note_unmapping)
    a.run(rpc.rpc_sync, "worker1", os.getpid)
    a.run(lambda: rpc.rpc_sync("worker1", identity, (torch.ones(MIB),)).sum())
    if is_killed:
        b.kill()
    for worker in [a] if is_killed else started:
        worker.run(assert_unmapped_by_executor)


def exchange(count):
    """Has worker1 keep some tensors of 1 MiB, and keeps as many of worker1's."""
    for number in range(count):
        rpc.rpc_sync("worker1", keep, (torch.full((MIB // 4,), float(number)),))
        kept.append(rpc.rpc_sync("worker1", torch.full, ((MIB // 4,), float(number))))


def test_nothing_is_left_of_a_killed_worker(pair):
    a, b = pair
    a.run(exchange, 50)
    a.run(release_kept, 20)
    made = segments_of([b.pid])
    assert len(made) >= 100
    b.kill()
    a.run(wait_until, lambda: used_bytes() == 0 and mapped_files() == (20, 0))
    assert len(made & segments_of()) == 20  # the ones whose tensors are kept
    assert a.run(kept_sums) == [number * MIB / 4 for number in range(20)]
    a.run(write_to_all)
    assert a.run(kept_sums) == [(number + 1) * MIB / 4 for number in range(20)]
    a.run(release_kept)
    assert not made & segments_of()


def test_the_size_of_dev_shm_does_not_matter(workers):
    """As in a container, which has 64 MB of it; here less, since a tensor has to be larger."""
    if reason := why_unavailable():
        pytest.skip(reason)
    started = workers(2)
    for worker in started:
        worker.run(separate, worker.name, workers.folder, MEMORY)
        worker.run(shrink_dev_shm)
    workers.join_rpc(started, transports=("unix", "grpc"))

    def send():
        rpc.rpc_sync("worker1", os.getpid)
        x = torch.arange(4 * MIB)
        assert rpc.rpc_sync("worker1", torch.sum, (x,)) == x.sum()
        assert used_bytes() == x.nbytes == 32 * MIB

    started[0].run(send)


def shrink_dev_shm():
    subprocess.run(["mount", "-o", "remount,size=2m", "/dev/shm"], check=True)
    shm = os.statvfs("/dev/shm")
    assert shm.f_blocks * shm.f_frsize == 2 * MIB


def test_a_call_that_is_not_sent_gives_its_segment_back(pair):
    a, _ = pair

    def check():
        rpc.rpc_sync("worker1", identity, (torch.ones(MIB),))
        before = used_bytes()
        assert before > 0
        used = network().peers.by_id[1].transport
        send = used.send

        def refuse(*_):
            raise SendFailedError("worker1", "on purpose")

        used.send = refuse
        for _ in range(5):
            with pytest.raises(SendFailedError, match="on purpose"):
                rpc.rpc_sync("worker1", identity, (torch.ones(MIB),))
        used.send = send
        assert used_bytes() <= before + 4 * MIB

    a.run(check)


def test_a_pool_makes_what_it_lacks_within_its_limit():
    limit = SegmentLimit(300 << 10, MAX_SEGMENTS)
    pool = SegmentPool(limit, ["receiver"])
    first, is_new = pool.put(memoryview(bytes(100)))
    assert (first.size, is_new) == (64 << 10, True)
    second, _ = pool.put(memoryview(bytes(65 << 10)))
    assert second.size == 128 << 10
    assert pool.put(memoryview(bytes(200 << 10))) is None
    pool.take_back("receiver", [first.number, 77, first.number])
    assert pool.put(memoryview(bytes(1))) == (first, False)
    pool.take_back("receiver", [first.number])
    assert pool.remove_idle() == []
    assert pool.remove_idle() == [first]
    assert limit.used == 128 << 10
    pool.remove_receiver("receiver")
    assert limit.used == 0
    assert pool.put(memoryview(bytes(1))) is None
    for segment in (first, second):
        os.close(segment.descriptor)


def test_what_a_peer_says_of_segments_is_checked():
    released = []
    mapped = MappedSegments(1 << 20, lambda: released.append(True))
    segment = Segment(1, 1 << 17, memoryview(bytes(100_000)))
    with pytest.raises(ValueError, match="not the size"):
        mapped.add(1, 1 << 18, segment.descriptor)
    with open("/dev/null") as null, pytest.raises(ValueError, match="is no segment"):
        mapped.add(1, 1 << 17, null.fileno())
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 17)
    with pytest.raises(ValueError, match="may change"):
        mapped.add(1, 1 << 17, unsealed)
    for seal in (fcntl.F_SEAL_WRITE, F_SEAL_FUTURE_WRITE):
        fixed = os.memfd_create("fixed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fixed, 1 << 17)
        fcntl.fcntl(fixed, fcntl.F_ADD_SEALS, SEALS | seal)
        with pytest.raises(ValueError, match="cannot be written to"):
            mapped.add(1, 1 << 17, fixed)
        os.close(fixed)
    with (
        open(f"/proc/self/fd/{segment.descriptor}", "rb") as readable,
        pytest.raises(ValueError, match="cannot be written to"),
    ):
        mapped.add(1, 1 << 17, readable.fileno())
    mapped.add(1, 1 << 17, segment.descriptor)
    with pytest.raises(ValueError, match="is there already"):
        mapped.add(1, 1 << 17, segment.descriptor)
    for number, nbytes in ((2, 10), (1, 0), (1, (1 << 17) + 1)):
        with pytest.raises(ValueError, match="malformed payload"):
            mapped.use(number, nbytes)
    segment.fill(memoryview(struct.pack("<4I", 1, 2, 3, 4)))
    buffer = mapped.use(1, 16)
    assert struct.unpack("<4I", buffer) == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="malformed payload"):
        mapped.use(1, 16)
    assert not released
    del buffer
    assert released == [True]
    assert list(mapped.released) == [1]
    for descriptor in (unsealed, segment.descriptor):
        os.close(descriptor)


def test_a_segment_whose_descriptor_was_lost_is_not_used_again():
    released = []
    mapped = MappedSegments(1 << 20, lambda: released.append(True))
    mapped.add(1, 1 << 17, -1)
    with pytest.raises(ValueError, match="is there already"):
        mapped.add(1, 1 << 17, -1)
    with pytest.raises(ValueError, match="is refused: no file descriptor was left"):
        mapped.use(1, 10)
    mapped.drop(1)
    assert released == [True]
    assert not mapped.released
    assert mapped.take_spent() == ([1], [])
    with pytest.raises(ValueError, match="malformed payload"):
        mapped.use(1, 10)


taken = []
"""The descriptors that `take_descriptors` has taken."""


def take_descriptors():
    """Leaves this process no file descriptor."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            taken.append(os.dup(0))


def give_descriptors_back():
    while taken:
        os.close(taken.pop())


def test_a_worker_without_descriptors_refuses_payloads_and_no_peer(pair):
    a, b = pair
    b.run(take_descriptors)

    def send():
        assert rpc.rpc_sync("worker1", sum, ([1, 2],)) == 3
        for _ in range(2):
            with pytest.raises(ValueError, match="is refused: no file descriptor was left"):
                rpc.rpc_sync("worker1", torch.numel, (torch.ones(MIB),))
            assert rpc.rpc_sync("worker1", sum, ([1, 2],)) == 3
        rpc.rpc_sync("worker1", give_descriptors_back)
        assert rpc.rpc_sync("worker1", torch.numel, (torch.ones(MIB),)) == MIB
        wait_until(lambda: used_bytes() == 4 * MIB)  # those that were refused are dropped

    a.run(send)
    assert b.run(mapped_files) == (1, 0)


def test_what_is_not_used_any_more_is_given_back_without_another_message(pair):
    a, b = pair

    def send():
        rpc.rpc_sync("worker1", keep, (torch.ones(MIB),))

    def free_segments():
        (peer,) = segments_by_peer()
        return sum(map(len, peer.pool._free.values()))

    a.run(send)
    assert a.run(free_segments) == 0
    b.run(release_kept)
    a.run(wait_until, lambda: free_segments() == 1)
