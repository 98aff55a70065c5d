"""The shared-memory engine: errors, lost ranks, timeouts, the cost of waiting, and unsupported machines."""

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d import FileStore
from gradwire.c10d.engines import Setup
from gradwire.c10d.engines.shm import peers as shm_peers
from gradwire.c10d.engines.shm import segment as shm_segment
from gradwire.c10d.engines.shm.engine import ShmEngine
from gradwire.c10d.engines.shm.segment import BLOCKS_PER_CHANNEL, CACHE_LINE_BYTES, Doorbells, Layout
from gradwire.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    ProcessGroupError,
    RankLostError,
    UnsupportedOperationError,
)

from tests.c10d.members import everywhere, numbers, total
from tests.remote_functions import wait_until
from tests.workers import Worker

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11


def results_of(pending: Sequence[Any]) -> list[Any]:
    return [each.result() for each in pending]


# Point-to-point messages


def fill_a_channel() -> None:
    """Sends more messages than a channel has blocks, one of them larger, which are received last to first."""
    sizes = [10] * 3 * BLOCKS_PER_CHANNEL + [2 * BLOCKS_PER_CHANNEL * Layout(2).block_bytes]
    if dist.get_rank() == 0:
        for tag, size in enumerate(sizes):
            dist.send(numbers(tag, count=size, dtype=torch.uint8), 1, tag=tag)
    else:
        for tag, size in reversed(list(enumerate(sizes))):
            tensor = torch.zeros(size, dtype=torch.uint8)
            dist.recv(tensor, 0, tag=tag)
            assert torch.equal(tensor, numbers(tag, count=size, dtype=torch.uint8))


def test_a_message_with_another_tag_does_not_block(group):
    everywhere(group(2), fill_a_channel)


def receive_at_once() -> None:
    """Receives from each rank and from any rank at the same time."""
    me, size = dist.get_rank(), dist.get_world_size()
    count = 3 * Layout(size).block_bytes // 4 + 1
    if me:
        dist.send(torch.full((count,), float(me)), 0, tag=7)
        dist.send(torch.full((count,), -float(me)), 0, tag=1)
        return
    buffers = [torch.zeros(count) for _ in range(1, size)]
    from_any = [dist.irecv(tensor, None, tag=7) for tensor in buffers]
    each = {rank: torch.zeros(count) for rank in range(1, size)}
    from_each = [dist.irecv(tensor, rank, tag=1) for rank, tensor in each.items()]
    for work in [*reversed(from_each), *from_any]:
        work.wait()
    assert all(torch.equal(tensor, torch.full((count,), -float(rank))) for rank, tensor in each.items())
    sources = [work.source_rank() for work in from_any]
    assert sorted(sources) == list(range(1, size))
    for tensor, source in zip(buffers, sources, strict=True):
        assert torch.equal(tensor, torch.full((count,), float(source)))


def test_receives_from_each_and_from_any_rank_are_in_flight_at_once(group):
    everywhere(group(4), receive_at_once)


def send_too_much() -> str:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(5), 1, tag=3)
        return ""
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.recv(torch.zeros(4), 0, tag=3)
    return str(caught.value)


def test_a_message_of_another_size_is_refused(group):
    assert everywhere(group(2), send_too_much)[1] == (
        "rank 0 sent 20 bytes with tag 3, but rank 1 receives 16 bytes"
    )


# Mismatched calls


def call_differently() -> ProcessGroupError | None:
    try:
        if dist.get_rank() == 1:
            dist.broadcast(torch.zeros(4), 0)
        else:
            dist.all_reduce(torch.zeros(3), dist.ReduceOp.MAX)
        dist.barrier()
    except ProcessGroupError as error:
        return error
    return None


def test_different_calls_are_detected(group):
    errors = everywhere(group(2), call_differently)
    assert isinstance(errors[0], CollectiveMismatchError | RankLostError)
    assert isinstance(errors[1], CollectiveMismatchError | RankLostError)
    texts = " ".join(map(str, errors))
    assert "calls broadcast with root 0 of 16 bytes" in texts
    assert "calls all_reduce (max of float32) of 12 bytes" in texts


def give_wrong_sizes() -> str:
    me = dist.get_rank()
    outputs = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(ProcessGroupError) as caught:
        dist.all_to_all(outputs, [torch.zeros(2), torch.zeros(3 if me == 0 else 2)])
        dist.barrier()
    return str(caught.value)


def test_mismatched_sizes_are_detected(group):
    texts = everywhere(group(2), give_wrong_sizes)
    assert "rank 0 calls all_to_all with 12 bytes for rank 1, which takes 8 bytes" in " ".join(texts)


# Lost ranks


def reduce_for_ever() -> RankLostError:
    tensor = torch.ones(16 * 2**20)
    with pytest.raises(RankLostError) as caught:
        while True:
            tensor.fill_(1)
            dist.all_reduce(tensor)
    assert isinstance(caught.value, RankLostError)
    return caught.value


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_is_killed_is_named(group, size):
    members = group(size)
    going_on = [member.start(reduce_for_ever) for member in members]
    wait_until_busy(members[1])
    members[1].kill()
    for rank, each in enumerate(going_on):
        if rank != 1:
            error = each.result(20)
            assert error.rank == 1
            assert "ended" in error.reason  # the engine or the failure detector, whichever is first


def wait_until_busy(worker: Worker) -> None:
    """Waits until a worker has used 0.1 s of processor time, and so is in the middle of a collective."""
    start = cpu_seconds(worker.pid)
    while cpu_seconds(worker.pid) < start + 0.1:
        os.sched_yield()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shared_files() -> list[str]:
    """Returns the names of the files whose memory this process shares."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "rw-s" in line and len(line.split()) > 5]


def test_the_segment_has_no_name_so_that_the_kernel_frees_it(group):
    for names in everywhere(group(3), shared_files):
        assert set(names) == {"/memfd:gradwire-shm (deleted)"}


def wait_for_message() -> RankLostError:
    with pytest.raises(RankLostError) as caught:
        dist.recv(torch.zeros(1), 1)
    return caught.value


def test_a_receive_from_a_killed_rank_ends(group):
    members = group(3)
    waiting = [members[0].start(wait_for_message), members[2].start(wait_for_message)]
    members[1].kill()
    assert [each.result(20).rank for each in waiting] == [1, 1]


def leave() -> None:
    dist.send(torch.ones(1), 0)
    dist.destroy_process_group()


def receive_and_wait() -> str:
    tensor = torch.zeros(1)
    dist.recv(tensor, 1)
    assert tensor.item() == 1  # it was sent before the other rank left
    with pytest.raises(RankLostError) as caught:
        dist.barrier()
    return str(caught.value)


def test_a_departed_rank_is_an_error_only_where_it_is_needed(group):
    members = group(2)
    members[1].run(leave)
    text = members[0].run(receive_and_wait)
    assert text.startswith("rank 1 is lost: it left the group: rank 1 shut the group down")


# Timeouts and aborts


def time_out(kind: str) -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(CollectiveTimeoutError) as caught:
        if kind == "barrier":
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), 1, tag=5)
    return str(caught.value)


def test_timeouts_name_the_missing_ranks(group):
    members = group(3)
    assert "barrier timed out after 0.5 s, waiting for rank 1, 2 (" in members[0].run(time_out, "barrier")
    assert "recv with tag 5 timed out after 0.5 s, waiting for rank 1 (" in members[2].run(time_out, "recv")


def abort_while_waiting(kind: str) -> None:
    group = dist.group.WORLD
    engine = group.engine("cpu")
    asleep = threading.Event()
    sleep = Doorbells._sleep

    def sleep_and_tell(self: Doorbells, *args: int) -> None:
        asleep.set()
        sleep(self, *args)

    Doorbells._sleep = sleep_and_tell
    work = dist.barrier(async_op=True) if kind == "barrier" else dist.irecv(torch.zeros(1), 1)
    assert asleep.wait(30)
    engine.fail(GroupAbortedError("enough"))
    with pytest.raises(GroupAbortedError, match="enough"):
        work.wait()


@pytest.mark.parametrize("kind", ["barrier", "recv"])
def test_fail_ends_operations_in_flight(group, kind):
    group(2)[0].run(abort_while_waiting, kind)


# The cost of waiting


def cpu_time_of_a_barrier(begun: Path) -> tuple[float, float]:
    begun.touch()
    wall, cpu = time.monotonic(), time.process_time()
    dist.barrier()
    return time.process_time() - cpu, time.monotonic() - wall


def test_a_waiting_rank_uses_little_processor_time(group, tmp_path):
    first, second = group(2)
    waiting = first.start(cpu_time_of_a_barrier, tmp_path / "begun")
    wait_until((tmp_path / "begun").exists)
    threading.Event().wait(3)  # the wait that is measured
    second.run(dist.barrier)
    used, waited = waiting.result()
    assert waited > 1, "the barrier began too late to be measured"
    assert used < 0.1 * waited


def ping_pong(rank: int, path: Path, rounds: int) -> int:
    """Two processes that sleep until the other one wakes them, for up to an hour."""
    shm_segment.SPINS_BEFORE_YIELD = shm_segment.YIELDS_BEFORE_SLEEP = 0
    shm_segment._sleep_timeout.seconds = 3600
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    doorbells = Doorbells(memoryview(memory).cast("q"), ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    for number in range(1, rounds + 1):
        if rank == 0:
            doorbells.ring(0, number)
        doorbells.wait_for(1 - rank, number, lambda: None)
        if rank == 1:
            doorbells.ring(1, number)
    return doorbells.value(1 - rank)


def test_no_wake_up_is_lost(workers, tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    pending = [worker.start(ping_pong, rank, path, 3000) for rank, worker in enumerate(workers(2))]
    assert results_of(pending) == [3000, 3000]


# Unsupported machines and set-ups


def refusal(path: Path, rank: int, size: int, prepare: Callable[[], None] | None = None) -> str:
    """Returns the error of an engine that cannot be created."""
    store = FileStore(str(path), size)
    if prepare is not None:
        prepare()
    ranks = tuple(range(4, 4 + size))
    setup = Setup(
        store=store, rank=rank, size=size, timeout=10, device_type="cpu", global_ranks=ranks, group_name="x"
    )
    with pytest.raises(ProcessGroupError) as caught:
        ShmEngine(setup)
    return str(caught.value)


def test_ranks_on_two_hosts_are_refused(workers, tmp_path):
    other = tmp_path / "boot_id"
    other.write_text("another-boot\n")

    def move() -> None:
        shm_peers.BOOT_ID = other
        shm_peers.socket.gethostname = lambda: "elsewhere"

    store = tmp_path / "store"
    first, second = workers(2)
    texts = results_of([first.start(refusal, store, 0, 2), second.start(refusal, store, 1, 2, move)])
    assert texts[0] == texts[1]
    assert "engine 'shm' takes ranks on one host only, but rank 4 is on" in texts[0]
    assert "rank 5 on 'elsewhere'" in texts[0]
    assert "another-boot" in texts[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(workers, tmp_path):
    def become_nobody() -> None:
        os.setuid(65534)

    store = tmp_path / "store"
    first, second = workers(2)
    texts = results_of([first.start(refusal, store, 0, 2), second.start(refusal, store, 1, 2, become_nobody)])
    assert texts[0] == texts[1]
    assert "rank 5 cannot share memory with rank 4: Permission denied" in texts[0]


def no_memory() -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    os.memfd_create = refuse


def test_without_memory_all_ranks_get_the_error(workers, tmp_path):
    first, second = workers(2)
    store = tmp_path / "store"
    texts = results_of([first.start(refusal, store, 0, 2, no_memory), second.start(refusal, store, 1, 2)])
    assert all("Cannot allocate memory" in text for text in texts)


def test_a_missing_rank_is_named(workers, tmp_path):
    def alone() -> str:
        store = FileStore(str(tmp_path / "store"), 3)
        setup = Setup(
            store=store, rank=0, size=3, timeout=0.2, device_type="cpu", global_ranks=(4, 5, 6), group_name="x"
        )
        with pytest.raises(CollectiveTimeoutError) as caught:
            ShmEngine(setup)
        return str(caught.value)

    assert "creating the group timed out after 0.2 s, waiting for rank 5, 6 (" in workers(1)[0].run(alone)


def test_other_processors_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UnsupportedOperationError, match="cannot run on linux on aarch64: it needs Linux and the"):
        shm_segment.check_platform()


@pytest.mark.parametrize("size", [1, 2, 5, 8, 64, 128])
def test_the_segment_is_bounded(size):
    layout = Layout(size)
    assert layout.total_bytes <= 9.5 * 2**20 * size
    assert layout.reason_offset(0) == CACHE_LINE_BYTES * (1 + layout.channel(size - 1, size - 1).received)


def test_destroying_the_group_unmaps_the_segment(group):
    members = group(2)
    everywhere(members, total)
    everywhere(members, dist.destroy_process_group)
    assert everywhere(members, shared_files) == [[], []]
