"""The engine of shared memory, with real processes."""

import ctypes
import mmap
import os
import platform
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire.c10d
import pytest
import torch
import torch.distributed as dist
from gradwire.c10d import FileStore
from gradwire.c10d.engines import Setup, shm_members, shm_signals
from gradwire.c10d.engines.shm import ShmEngine
from gradwire.c10d.engines.shm_layout import BLOCKS, SLOT, Layout
from gradwire.c10d.engines.shm_signals import LINE, Signals
from gradwire.c10d.reductions import Reduction, combine
from gradwire.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupAbortedError,
    ProcessGroupError,
    RankLostError,
    UnsupportedOperationError,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers import Worker

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

SUM = Reduction("sum")


def join(path: Path, rank: int, size: int) -> None:
    assert gradwire.c10d
    torch.set_num_threads(1)
    globals()["store"] = FileStore(str(path), size)
    dist.init_process_group(
        "gradwire_shm", store=globals()["store"], rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def each_ends(pending: Sequence[Any]) -> list[Any]:
    return [each.result() for each in pending]


@pytest.fixture
def group(workers, tmp_path):
    """Starts workers in a group; `group(2)` is [worker, worker]."""

    def start(size: int) -> list[Worker]:
        members = workers(size)
        each_ends([member.start(join, tmp_path / "store", rank, size) for rank, member in enumerate(members)])
        return members

    return start


def everywhere(members: Sequence[Worker], function: Callable[..., Any], *args: Any) -> list[Any]:
    return each_ends([member.start(function, *args) for member in members])


def numbers(*seed: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same random numbers wherever they are asked for with this seed."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def in_order_of_ranks(tensors: Sequence[Tensor], reduction: Reduction = SUM) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        combine(reduction, total, tensor, total)
    return total


# Sizes


def reduce_sizes() -> None:
    """Sums of all sizes, bit for bit as computed here in the order of ranks, so the same everywhere."""
    me, ranks = dist.get_rank(), range(dist.get_world_size())
    for count in (1, 3, 4099, 8193, SLOT // 4 - 1, SLOT // 4, SLOT // 4 + 1, 3 * SLOT // 4 + 17):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = numbers(me, count, count=count, dtype=dtype)
            dist.all_reduce(tensor)
            assert torch.equal(
                tensor, in_order_of_ranks([numbers(rank, count, count=count, dtype=dtype) for rank in ranks])
            )


def move_sizes() -> None:
    """Data of sizes around those of slots and blocks."""
    me, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, SLOT - 1, SLOT, 2 * SLOT + 1):

        def data(*seed: int, count: int = count) -> Tensor:
            return numbers(*seed, count=count, dtype=torch.uint8)

        for root in {0, size - 1}:
            tensor = data(root) if me == root else data(99)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, data(root))
        outputs = [data(98) for _ in range(size)]
        dist.all_gather(outputs, data(me))
        assert all(torch.equal(output, data(rank)) for rank, output in enumerate(outputs))
        dist.scatter(tensor, [data(5, rank) for rank in range(size)] if me == 0 else None, 0)
        assert torch.equal(tensor, data(5, me))
        dist.gather(tensor, outputs if me == 0 else None, 0)
        assert me or all(torch.equal(output, data(5, rank)) for rank, output in enumerate(outputs))
        into = [data(97)[: count // (1 + me + rank)] for rank in range(size)]
        dist.all_to_all(into, [data(me, to)[: count // (1 + me + to)] for to in range(size)])
        for rank, part in enumerate(into):
            assert torch.equal(part, data(rank, me)[: count // (1 + me + rank)])
        ints = torch.zeros(count, dtype=torch.int64)
        dist.reduce_scatter(ints, [data(me, to).long() for to in range(size)])
        assert torch.equal(ints, sum(data(rank, me).long() for rank in range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_tensors_of_all_sizes_on_any_number_of_ranks(group, size):
    members = group(size)
    everywhere(members, reduce_sizes)
    if size != 8:
        everywhere(members, move_sizes)


def premultiplied() -> list[float]:
    op = dist._make_nccl_premul_sum(0.5)
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, op)
    inputs = [torch.tensor([4.0 + to]) for to in range(dist.get_world_size())]
    output = torch.zeros(1)
    dist.reduce_scatter(output, inputs, op)
    assert [each.item() for each in inputs] == [4.0, 5.0]
    return [tensor.item(), output.item()]


def test_what_is_multiplied_first(group):
    assert everywhere(group(2), premultiplied) == [[1.5, 4.0], [1.5, 5.0]]


def conjugates() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    tensor = values.clone().conj()
    outputs = [torch.zeros(2, dtype=torch.complex64) for _ in range(2)]
    dist.group.WORLD.allgather([outputs], [tensor]).wait()  # torch.distributed's own functions refuse it
    assert torch.equal(outputs[1 - dist.get_rank()], torch.tensor([1 - 2j, 3 + 4j]))
    imaginary = values.conj().imag
    dist.all_reduce(imaginary)
    assert imaginary.tolist() == [-4.0, 8.0]


def test_lazy_conjugates_travel_as_their_values(group):
    everywhere(group(2), conjugates)


# Random programs

COUNTS = st.sampled_from([0, 1, 7, 1000, SLOT // 4 + 3])
OPERATIONS = st.one_of(
    st.tuples(st.just("all_reduce"), COUNTS, st.booleans()),
    st.tuples(st.just("broadcast"), COUNTS, st.booleans()),
    st.tuples(st.just("all_gather"), COUNTS, st.booleans()),
    st.tuples(st.just("barrier"), st.just(0), st.booleans()),
    st.tuples(st.just("exchange"), COUNTS, st.booleans()),
    st.tuples(st.just("to_anyone"), COUNTS, st.booleans()),
)
"""Kind, elements, and whether the program goes on before it is done."""


class Program:
    """Runs operations on one rank; what each gave is compared once all are done."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.me, self.size = dist.get_rank(), dist.get_world_size()
        self.works: list[Any] = []
        self.results: list[tuple[str, Tensor, Tensor]] = []

    def run(self, operations: Sequence[tuple[str, int, bool]]) -> None:
        for step, (kind, count, asynchronous) in enumerate(operations):
            works = list(getattr(self, kind)(step, count))
            if asynchronous:
                self.works += works
            else:
                for work in works:
                    work.wait()
        random.Random(self.me).shuffle(self.works)
        for work in self.works:
            work.wait()
        for what, got, wanted in self.results:
            assert torch.equal(got, wanted), what

    def expect(self, step: int, kind: str, got: Tensor, wanted: Tensor) -> None:
        self.results.append((f"{kind} at {step}", got, wanted))

    def all_reduce(self, step: int, count: int) -> Any:
        tensor = numbers(step, self.me, count=count)
        wanted = in_order_of_ranks([numbers(step, rank, count=count) for rank in range(self.size)])
        self.expect(step, "all_reduce", tensor, wanted)
        yield dist.all_reduce(tensor, group=self.group, async_op=True)

    def broadcast(self, step: int, count: int) -> Any:
        root = step % self.size
        tensor = numbers(step, self.me, count=count)
        self.expect(step, "broadcast", tensor, numbers(step, root, count=count))
        yield dist.broadcast(tensor, root, group=self.group, async_op=True)

    def all_gather(self, step: int, count: int) -> Any:
        outputs = [torch.empty(count + rank) for rank in range(self.size)]
        for rank, output in enumerate(outputs):
            self.expect(step, "all_gather", output, numbers(step, rank, count=count + rank))
        tensor = numbers(step, self.me, count=count + self.me)
        yield dist.all_gather(outputs, tensor, group=self.group, async_op=True)

    def barrier(self, step: int, count: int) -> Any:
        yield dist.barrier(group=self.group, async_op=True)

    def exchange(self, step: int, count: int) -> Any:
        """Two messages to the next rank, which takes the second first."""
        after, before = (self.me + 1) % self.size, (self.me - 1) % self.size
        for tag in (0, 1):
            yield dist.isend(numbers(step, self.me, tag, count=count), after, self.group, 10 * step + tag)
        for tag in (1, 0):
            tensor = torch.empty(count)
            self.expect(step, "exchange", tensor, numbers(step, before, tag, count=count))
            yield dist.irecv(tensor, before, self.group, 10 * step + tag)

    def to_anyone(self, step: int, count: int) -> Any:
        """All send to one, which takes what comes: what is alike."""
        to = step % self.size
        if self.me != to:
            yield dist.isend(numbers(step, count=count), to, self.group, 10 * step)
            return
        for _ in range(1, self.size):
            tensor = torch.empty(count)
            self.expect(step, "to_anyone", tensor, numbers(step, count=count))
            yield dist.irecv(tensor, None, self.group, 10 * step)


def run_program(operations: Sequence[tuple[str, int, bool]]) -> None:
    group = dist.new_group(backend="gradwire_shm")
    try:
        Program(group).run(operations)
        dist.barrier(group=group)
    finally:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [3, 4])
def test_random_programs(group, size):
    members = group(size)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPERATIONS, min_size=1, max_size=10))
    def run(operations):
        everywhere(members, run_program, operations)

    run()


# Messages


def fill_a_channel() -> None:
    """More messages than a channel has blocks, and one larger than it, which the other takes last to first."""
    sizes = [10] * 3 * BLOCKS + [2 * BLOCKS * Layout(2).block_bytes]
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
    """From each rank and from any, at the same time."""
    me, size = dist.get_rank(), dist.get_world_size()
    count = 3 * Layout(size).block_bytes // 4 + 1
    if me:
        dist.send(torch.full((count,), float(me)), 0, tag=7)
        dist.send(torch.full((count,), -float(me)), 0, tag=1)
        return
    anyone = [torch.zeros(count) for _ in range(1, size)]
    from_any = [dist.irecv(tensor, None, tag=7) for tensor in anyone]
    each = {rank: torch.zeros(count) for rank in range(1, size)}
    from_each = [dist.irecv(tensor, rank, tag=1) for rank, tensor in each.items()]
    for work in [*reversed(from_each), *from_any]:
        work.wait()
    assert all(torch.equal(tensor, torch.full((count,), -float(rank))) for rank, tensor in each.items())
    sources = [work.source_rank() for work in from_any]
    assert sorted(sources) == list(range(1, size))
    for tensor, source in zip(anyone, sources, strict=True):
        assert torch.equal(tensor, torch.full((count,), float(source)))


def test_receives_from_each_and_from_any_go_on_at_once(group):
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


# Ranks that do not fit together


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


def test_different_calls_are_noticed(group):
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


def test_sizes_that_do_not_fit_are_noticed(group):
    texts = everywhere(group(2), give_wrong_sizes)
    assert "rank 0 calls all_to_all with 12 bytes for rank 1, which takes 8 bytes" in " ".join(texts)


# The end of ranks


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
            assert "ended" in error.reason  # says the engine or the watch over the group, whichever sees it first


def wait_until_busy(worker: Worker) -> None:
    """Until it has used so much time of a processor that it is in the middle of something."""
    start = cpu_seconds(worker.pid)
    while cpu_seconds(worker.pid) < start + 0.1:
        os.sched_yield()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shared_files() -> list[str]:
    """What of this process's memory has, or had, a name in a file system."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if "rw-s" in line and len(line.split()) > 5]


def test_the_memory_has_no_name_so_that_nothing_is_left_of_ranks_that_are_killed(group):
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
    assert tensor.item() == 1  # what was sent before the other left is there
    with pytest.raises(RankLostError) as caught:
        dist.barrier()
    return str(caught.value)


def test_a_rank_that_leaves_is_missed_only_where_it_is_needed(group):
    members = group(2)
    members[1].run(leave)
    assert members[0].run(receive_and_wait) == "rank 1 is lost: it left the group: rank 1 shut the group down"


# Limits of time, and aborts


def time_out(kind: str) -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(CollectiveTimeoutError) as caught:
        if kind == "barrier":
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), 1, tag=5)
    return str(caught.value)


def test_timeouts_name_the_ranks_that_did_not_come(group):
    members = group(3)
    assert members[0].run(time_out, "barrier") == "barrier timed out after 0.5 s, waiting for rank 1, 2"
    assert members[2].run(time_out, "recv") == "recv with tag 5 timed out after 0.5 s, waiting for rank 1"


def abort_while_waiting(kind: str) -> None:
    group = dist.group.WORLD
    engine = group._engines["cpu"]
    asleep = threading.Event()
    sleep = Signals._sleep

    def tell(self: Signals, *args: int) -> None:
        asleep.set()
        sleep(self, *args)

    Signals._sleep = tell
    work = dist.barrier(async_op=True) if kind == "barrier" else dist.irecv(torch.zeros(1), 1)
    assert asleep.wait(30)
    engine.fail(GroupAbortedError("enough"))
    with pytest.raises(GroupAbortedError, match="enough"):
        work.wait()


@pytest.mark.parametrize("kind", ["barrier", "recv"])
def test_fail_ends_what_is_under_way(group, kind):
    group(2)[0].run(abort_while_waiting, kind)


# What waiting costs


def cpu_time_of_a_barrier() -> tuple[float, float]:
    wall, cpu = time.monotonic(), time.process_time()
    dist.barrier()
    return time.process_time() - cpu, time.monotonic() - wall


def test_who_waits_uses_little_of_a_processor(group):
    first, second = group(2)
    waiting = first.start(cpu_time_of_a_barrier)
    threading.Event().wait(3)  # the wait that is measured
    second.run(dist.barrier)
    used, waited = waiting.result()
    assert waited > 2.5
    assert used < 0.1 * waited


def ping_pong(rank: int, path: Path, rounds: int) -> int:
    """Two processes that always sleep until the other wakes them, and would for an hour."""
    shm_signals.GLANCES = shm_signals.YIELDS = 0
    shm_signals._slice.seconds = 3600
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    signals = Signals(memoryview(memory).cast("q"), ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    for number in range(1, rounds + 1):
        if rank == 0:
            signals.post(0, number)
        signals.wait(1 - rank, number, lambda: None)
        if rank == 1:
            signals.post(1, number)
    return signals.value(1 - rank)


def test_no_wake_up_is_lost(workers, tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(bytes(4096))
    pending = [worker.start(ping_pong, rank, path, 3000) for rank, worker in enumerate(workers(2))]
    assert each_ends(pending) == [3000, 3000]


# Where it does not work


def refusal(path: Path, rank: int, size: int, prepare: Callable[[], None] | None = None) -> str:
    """What an engine says that cannot be made."""
    store = FileStore(str(path), size)
    if prepare is not None:
        prepare()
    ranks = tuple(range(4, 4 + size))
    setup = Setup(store=store, rank=rank, size=size, timeout=10, device="cpu", global_ranks=ranks, group="x")
    with pytest.raises(ProcessGroupError) as caught:
        ShmEngine(setup)
    return str(caught.value)


def test_ranks_on_two_hosts_are_refused(workers, tmp_path):
    other = tmp_path / "boot_id"
    other.write_text("another-boot\n")

    def move() -> None:
        shm_members.BOOT_ID = other
        shm_members.socket.gethostname = lambda: "elsewhere"

    store = tmp_path / "store"
    first, second = workers(2)
    texts = each_ends([first.start(refusal, store, 0, 2), second.start(refusal, store, 1, 2, move)])
    assert texts[0] == texts[1]
    assert "engine 'shm' takes ranks on one host only, but rank 4 is on" in texts[0]
    assert "rank 5 on 'elsewhere'" in texts[0]
    assert "another-boot" in texts[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_refused(workers, tmp_path):
    def become_nobody() -> None:
        os.setuid(65534)

    store = tmp_path / "store"
    first, second = workers(2)
    texts = each_ends([first.start(refusal, store, 0, 2), second.start(refusal, store, 1, 2, become_nobody)])
    assert texts[0] == texts[1]
    assert "rank 5 cannot share memory with rank 4: Permission denied" in texts[0]


def no_memory() -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    os.memfd_create = refuse


def test_without_memory_all_ranks_are_told(workers, tmp_path):
    first, second = workers(2)
    store = tmp_path / "store"
    texts = each_ends([first.start(refusal, store, 0, 2, no_memory), second.start(refusal, store, 1, 2)])
    assert all("Cannot allocate memory" in text for text in texts)


def test_a_rank_that_does_not_come_is_named(workers, tmp_path):
    def alone() -> str:
        store = FileStore(str(tmp_path / "store"), 3)
        setup = Setup(store=store, rank=0, size=3, timeout=0.2, device="cpu", global_ranks=(4, 5, 6), group="x")
        with pytest.raises(CollectiveTimeoutError) as caught:
            ShmEngine(setup)
        return str(caught.value)

    assert workers(1)[0].run(alone) == "the set-up of the group timed out after 0.2 s, waiting for rank 5, 6"


def test_other_processors_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UnsupportedOperationError, match="cannot run on linux on aarch64: it needs Linux and the"):
        shm_signals.check_platform("shm")


@pytest.mark.parametrize("size", [1, 2, 5, 8, 64, 128])
def test_the_memory_is_bounded(size):
    layout = Layout(size)
    assert layout.total <= 9.5 * 2**20 * size
    assert layout.text(0) == LINE * (1 + layout.taken(size - 1, size - 1))


def test_destroying_the_group_gives_the_memory_back(group):
    members = group(2)
    everywhere(members, reduce_sizes)
    everywhere(members, dist.destroy_process_group)
    assert everywhere(members, shared_files) == [[], []]
