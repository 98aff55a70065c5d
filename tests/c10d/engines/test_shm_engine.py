"""The shared-memory engine, with real processes."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d.engines.reductions import Reduction, combine
from gradwire.c10d.engines.shm.segment import SLOT_BYTES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.c10d.members import everywhere, numbers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

SUM = Reduction("sum")


def in_order_of_ranks(tensors: Sequence[Tensor], reduction: Reduction = SUM) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        combine(reduction, total, tensor, total)
    return total


# Sizes


def reduce_sizes() -> None:
    """Sums of many sizes have the same bits on every rank: those of a sum in the order of ranks."""
    me, ranks = dist.get_rank(), range(dist.get_world_size())
    for count in (
        1,
        3,
        4099,
        8193,
        SLOT_BYTES // 4 - 1,
        SLOT_BYTES // 4,
        SLOT_BYTES // 4 + 1,
        3 * SLOT_BYTES // 4 + 17,
    ):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = numbers(me, count, count=count, dtype=dtype)
            dist.all_reduce(tensor)
            assert torch.equal(
                tensor, in_order_of_ranks([numbers(rank, count, count=count, dtype=dtype) for rank in ranks])
            )


def move_sizes() -> None:
    """Moves data of sizes around those of slots and blocks."""
    me, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, SLOT_BYTES - 1, SLOT_BYTES, 2 * SLOT_BYTES + 1):

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


def test_premultiplied_sums(group):
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

COUNTS = st.sampled_from([0, 1, 7, 1000, SLOT_BYTES // 4 + 3])
OPERATIONS = st.one_of(
    st.tuples(st.just("all_reduce"), COUNTS, st.booleans()),
    st.tuples(st.just("broadcast"), COUNTS, st.booleans()),
    st.tuples(st.just("all_gather"), COUNTS, st.booleans()),
    st.tuples(st.just("barrier"), st.just(0), st.booleans()),
    st.tuples(st.just("exchange"), COUNTS, st.booleans()),
    st.tuples(st.just("to_any"), COUNTS, st.booleans()),
)
"""Kind, number of elements, and whether the program waits only at its end."""


class Program:
    """Runs operations on one rank, and compares their results once all are done."""

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
        for description, got, wanted in self.results:
            assert torch.equal(got, wanted), description

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
        """Sends two messages to the next rank, which receives the second one first."""
        after, before = (self.me + 1) % self.size, (self.me - 1) % self.size
        for tag in (0, 1):
            yield dist.isend(numbers(step, self.me, tag, count=count), after, self.group, 10 * step + tag)
        for tag in (1, 0):
            tensor = torch.empty(count)
            self.expect(step, "exchange", tensor, numbers(step, before, tag, count=count))
            yield dist.irecv(tensor, before, self.group, 10 * step + tag)

    def to_any(self, step: int, count: int) -> Any:
        """All ranks send the same values to one rank, which receives from any rank."""
        to = step % self.size
        if self.me != to:
            yield dist.isend(numbers(step, count=count), to, self.group, 10 * step)
            return
        for _ in range(1, self.size):
            tensor = torch.empty(count)
            self.expect(step, "to_any", tensor, numbers(step, count=count))
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

    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPERATIONS, min_size=1, max_size=10))
    def run(operations):
        everywhere(members, run_program, operations)

    run()
