"""All engines accept the same arguments, and give the same results or the same errors for them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d.engines.shm import segment
from gradwire.errors import CollectiveMismatchError, RankLostError
from torch import Tensor

from tests.c10d.members import everywhere, total

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

ENGINES = ["gradwire_shm", "gradwire_gloo", "gradwire_mpi", "fake_nccl"]

SIZE = 3
"""Ranks of each group."""

# Tensors that share memory. Each function gets a part of its tensors from `place`, which returns a tensor either
# as it is, so that it shares memory with others, or as a copy. The results must be the same.

Place = Callable[[Tensor], Tensor]


def values(count: int, rank: int) -> Tensor:
    """Returns different numbers for each rank and element."""
    return torch.arange(float(count)) + 100 * rank


def all_to_all_single_in_place(place: Place, rank: int) -> list[Tensor]:
    whole = values(2 * SIZE, rank)
    output = place(whole)
    dist.all_to_all_single(output, whole)
    return [output]


def large_all_to_all_single_in_place(place: Place, rank: int) -> list[Tensor]:
    whole = values(SIZE * 60_000, rank)  # goes through the slots of shared memory in pieces
    output = place(whole)
    dist.all_to_all_single(output, whole)
    return [output]


def uneven_all_to_all_single_in_place(place: Place, rank: int) -> list[Tensor]:
    sent = [1 + (rank + to) % SIZE for to in range(SIZE)]
    received = [1 + (source + rank) % SIZE for source in range(SIZE)]
    whole = values(sum(sent), rank)
    output = place(whole)
    dist.all_to_all_single(output, whole, received, sent)
    return [output]


def all_to_all_single_of_halves(place: Place, rank: int) -> list[Tensor]:
    """The output begins in the middle of the input."""
    memory = values(3 * SIZE, rank)
    output = place(memory[SIZE:])
    dist.all_to_all_single(output, memory[: 2 * SIZE])
    return [output]


def asynchronous_all_to_all_single_in_place(place: Place, rank: int) -> list[Tensor]:
    whole = values(2 * SIZE, rank)
    output = place(whole)
    dist.all_to_all_single(output, whole, async_op=True).wait()
    return [output]


def all_to_all_into_its_inputs(place: Place, rank: int) -> list[Tensor]:
    inputs = [values(2, 10 * rank + to) for to in range(SIZE)]
    outputs = [place(each) for each in reversed(inputs)]
    dist.all_to_all(outputs, inputs)
    return outputs


def all_to_all_into_one_tensor(place: Place, rank: int) -> list[Tensor]:
    """The outputs are one tensor, so the last one counts, as with torch's own groups."""
    output = torch.zeros(2)
    outputs = [place(output) for _ in range(SIZE)]
    dist.all_to_all(outputs, [values(2, 10 * rank + to) for to in range(SIZE)])
    return outputs[-1:]


def all_gather_into_one_tensor(place: Place, rank: int) -> list[Tensor]:
    output = torch.zeros(2)
    outputs = [place(output) for _ in range(SIZE)]
    dist.all_gather(outputs, values(2, rank))
    return outputs[-1:]


def all_gather_of_an_output(place: Place, rank: int) -> list[Tensor]:
    outputs = [values(2, 10 * rank + to) for to in range(SIZE)]
    dist.all_gather(outputs, place(outputs[rank]))
    return outputs


def all_gather_of_the_output_of_another_rank(place: Place, rank: int) -> list[Tensor]:
    outputs = [values(2, 10 * rank + to) for to in range(SIZE)]
    dist.all_gather(outputs, place(outputs[(rank + 1) % SIZE]))
    return outputs


def uneven_all_gather_of_the_output_of_another_rank(place: Place, rank: int) -> list[Tensor]:
    memory = values(8, rank)
    outputs = [memory[:1], memory[1:3], memory[3:6]]
    dist.all_gather(outputs, place(memory[4 - rank : 5]))
    return outputs


def all_gather_single_of_its_own_part(place: Place, rank: int) -> list[Tensor]:
    output = values(2 * SIZE, rank)
    dist.all_gather_into_tensor(output, place(output[2 * rank : 2 * rank + 2]))
    return [output]


def all_gather_single_of_the_part_of_another_rank(place: Place, rank: int) -> list[Tensor]:
    output = values(2 * SIZE, rank)
    start = 2 * ((rank + 1) % SIZE)
    dist.all_gather_into_tensor(output, place(output[start : start + 2]))
    return [output]


def gather_of_an_output(place: Place, rank: int) -> list[Tensor]:
    outputs = [values(2, 10 * rank + to) for to in range(SIZE)]
    for root in range(SIZE):
        for which in range(SIZE):
            dist.gather(place(outputs[which]), outputs if rank == root else None, root)
    return outputs


def scatter_into_an_input(place: Place, rank: int) -> list[Tensor]:
    found = []
    for root in range(SIZE):
        for which in range(SIZE):
            inputs = [values(2, 10 * rank + to) for to in range(SIZE)]
            found.append(place(inputs[which]))
            dist.scatter(found[-1], inputs if rank == root else None, root)
    return found


def reduce_scatter_into_an_input(place: Place, rank: int) -> list[Tensor]:
    found = []
    for which in range(SIZE):
        inputs = [values(2, 10 * rank + to) for to in range(SIZE)]
        found.append(place(inputs[which]))
        dist.reduce_scatter(found[-1], inputs)
    return found


def uneven_reduce_scatter_into_an_input(place: Place, rank: int) -> list[Tensor]:
    memory = values(6, rank)
    output = place(memory[1 : 2 + rank])
    dist.reduce_scatter(output, [memory[:1], memory[1:3], memory[3:6]])
    return [output]


def reduce_scatter_single_into_a_part(place: Place, rank: int) -> list[Tensor]:
    found = []
    for start in range(SIZE + 1):
        whole = values(2 * SIZE, rank)
        found.append(place(whole[start : start + 2]))
        dist.reduce_scatter_tensor(found[-1], whole)
    return found


def strided_outputs_of_one_tensor(place: Place, rank: int) -> list[Tensor]:
    """The outputs are columns of the matrix that the input is a row of."""
    matrix = values(SIZE * SIZE, rank).view(SIZE, SIZE)
    outputs = list(place(matrix).unbind(1))
    dist.all_gather(outputs, matrix[rank])
    return outputs


def coalesced_all_reduce_of_one_tensor(place: Place, rank: int) -> list[Tensor]:
    tensor = values(4, rank)
    with dist._coalescing_manager():
        for each in (tensor, place(tensor), place(tensor[1:3])):
            dist.all_reduce(each)
    return [tensor]


def coalesced_all_gathers(place: Place, rank: int) -> list[Tensor]:
    """The input of the second is the output of the first."""
    first, second = values(SIZE, rank), torch.zeros(SIZE)
    given = place(first[:1])
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(first, values(1, 7 * rank))
        dist.all_gather_into_tensor(second, given)
    return [first, second]


SHARED_MEMORY = [
    all_to_all_single_in_place,
    large_all_to_all_single_in_place,
    uneven_all_to_all_single_in_place,
    all_to_all_single_of_halves,
    asynchronous_all_to_all_single_in_place,
    all_to_all_into_its_inputs,
    all_to_all_into_one_tensor,
    all_gather_into_one_tensor,
    all_gather_of_an_output,
    all_gather_of_the_output_of_another_rank,
    uneven_all_gather_of_the_output_of_another_rank,
    all_gather_single_of_its_own_part,
    all_gather_single_of_the_part_of_another_rank,
    gather_of_an_output,
    scatter_into_an_input,
    reduce_scatter_into_an_input,
    uneven_reduce_scatter_into_an_input,
    reduce_scatter_single_into_a_part,
    strided_outputs_of_one_tensor,
    coalesced_all_reduce_of_one_tensor,
    coalesced_all_gathers,
]


def sleep_at_once() -> None:
    """Has ranks on shared memory sleep rather than yield, which with more ranks than processors takes longer."""
    segment.YIELDS_BEFORE_SLEEP = 0


def share_memory() -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    """Returns for each of SHARED_MEMORY its results with tensors that share memory, and with copies."""
    rank = dist.get_rank()
    found = {}
    for run in SHARED_MEMORY:
        both = [[each.tolist() for each in run(place, rank)] for place in (lambda tensor: tensor, torch.clone)]
        found[run.__name__] = both[0], both[1]
    return found


@pytest.mark.parametrize("backend", ENGINES)
def test_tensors_that_share_memory_give_what_copies_give(group_on, backend):
    members = group_on(backend, SIZE)
    everywhere(members, sleep_at_once)
    for found in everywhere(members, share_memory):
        wrong = [name for name, (shared, copied) in found.items() if shared != copied]
        assert wrong == []


# Arguments that are refused, on the rank that gives them, before anything is sent.

Collective = Callable[[Any], Any]
"""Calls a collective of a group of SIZE ranks with bad arguments."""

FLAT = torch.ones(6)
THREE = [torch.ones(2) for _ in range(SIZE)]
TWO_SIZES = [torch.ones(2), torch.ones(3), torch.ones(2)]

REFUSED: dict[str, tuple[Collective, type[Exception], str]] = {
    "broadcast of a list": (
        lambda g: g.broadcast([FLAT, FLAT]),
        ValueError,
        "takes one tensor of each rank, not 2",
    ),
    "broadcast of a number": (lambda g: g.broadcast([1.0]), TypeError, "takes tensors, not a float"),
    "broadcast of a sparse tensor": (
        lambda g: g.broadcast([FLAT.to_sparse()]),
        ValueError,
        r"takes dense tensors, not torch.sparse_coo: call to_dense\(\) first",
    ),
    "broadcast into an expanded tensor": (
        lambda g: g.broadcast([torch.ones(1).expand(4)]),
        ValueError,
        r"several of its elements share memory: clone\(\) it",
    ),
    "broadcast from no rank": (
        lambda g: g.broadcast([FLAT], _rooted(dist.BroadcastOptions(), 3)),
        ValueError,
        "root is 3, but the group has the ranks 0 to 2",
    ),
    "bits of floats": (
        lambda g: g.allreduce([FLAT], _reducing(dist.AllreduceOptions(), dist.ReduceOp.BAND)),
        ValueError,
        "all_reduce cannot use band on torch.float32",
    ),
    "no tensors": (lambda g: g.allreduce_coalesced([]), ValueError, "needs at least one tensor"),
    "two dtypes": (
        lambda g: g.allreduce_coalesced([FLAT, FLAT.int()]),
        ValueError,
        "takes tensors of one dtype on one device, but got torch.float32 on cpu and torch.int32 on cpu",
    ),
    "too few outputs": (
        lambda g: g.allgather([THREE[:2]], [FLAT[:2]]),
        ValueError,
        "takes one of its outputs for each of the 3 ranks, but got 2",
    ),
    "output of another size": (
        lambda g: g.allgather([THREE], [FLAT]),
        ValueError,
        "the output for this rank's own input has 2 elements, the input 6",
    ),
    "output of another dtype": (
        lambda g: g.allgather([THREE], [FLAT[:2].double()]),
        ValueError,
        "takes tensors of one dtype on one device",
    ),
    "whole of another size": (
        lambda g: g.all_gather_single(torch.ones(5), FLAT[:2]),
        ValueError,
        "the output must have 3 times the elements of the input, but they have 5 and 2",
    ),
    "lists of two lengths": (
        lambda g: g.all_gather_single_coalesced([FLAT], [FLAT[:2], FLAT[:2]]),
        ValueError,
        "takes one output for each of the 2 inputs, but got 1",
    ),
    "lists of outputs of two lengths": (
        lambda g: g.allgather_coalesced([THREE[:1], THREE[:1], []], [FLAT[:2]]),
        ValueError,
        "takes one output for each of the 1 inputs, but got 0",
    ),
    "gather of two sizes": (
        lambda g: g.gather([TWO_SIZES], [FLAT[:2]]),
        ValueError,
        "gather takes outputs of one size, but that of rank 1 has 3 elements and the root's own 2: use all_to_all",
    ),
    "gather without outputs": (
        lambda g: g.gather([], [FLAT[:2]]),
        ValueError,
        "takes one of its outputs for each of the 3 ranks, but got 0",
    ),
    "gather with outputs elsewhere": (
        lambda g: g.gather([THREE], [FLAT[:2]], _rooted(dist.GatherOptions(), 1)),
        ValueError,
        "gather has outputs on rank 0, but only its root, rank 1, may",
    ),
    "scatter of two sizes": (
        lambda g: g.scatter([FLAT[:2]], [TWO_SIZES]),
        ValueError,
        "scatter takes inputs of one size, but that of rank 1 has 3 elements and the root's own 2: use all_to_all",
    ),
    "reduce_scatter of too few": (
        lambda g: g.reduce_scatter([FLAT[:2]], [THREE[:2]]),
        ValueError,
        "takes one of its inputs for each of the 3 ranks, but got 2",
    ),
    "reduce_scatter of another size": (
        lambda g: g.reduce_scatter([FLAT[:3]], [THREE]),
        ValueError,
        "the output for this rank's own input has 3 elements, the input 2",
    ),
    "reduce_scatter of a part": (
        lambda g: g.reduce_scatter_single(FLAT[:2], torch.ones(7)),
        ValueError,
        "the input must have 3 times the elements of the output, but they have 7 and 2",
    ),
    "all_to_all of another size": (
        lambda g: g.alltoall(THREE, [FLAT, FLAT, FLAT]),
        ValueError,
        "the output for this rank's own input has 2 elements, the input 6",
    ),
    "rows that cannot be split": (
        lambda g: g.all_to_all_single(torch.ones(7), torch.ones(7), [], []),
        ValueError,
        "7 rows of the output cannot be split evenly among 3 ranks; give split sizes",
    ),
    "two sizes": (
        lambda g: g.all_to_all_single(FLAT, torch.ones(9), [], []),
        ValueError,
        "the output for this rank's own input has 6 elements, the input 9",
    ),
    "too few split sizes": (
        lambda g: g.all_to_all_single(FLAT, FLAT, [3, 3], [3, 3]),
        ValueError,
        r"split sizes \[3, 3\] do not fit: give 3, none negative, whose sum is the 6 rows of the output",
    ),
    "negative split sizes": (
        lambda g: g.all_to_all_single(FLAT, FLAT, [2, 2, 2], [2, 6, -2]),
        ValueError,
        r"split sizes \[2, 6, -2\] do not fit: give 3, none negative, whose sum is the 6 rows of the input",
    ),
    "negative tag": (lambda g: g.send([FLAT], 1, -1), ValueError, "send: the tag is -1: give 0 or more"),
    "no peer": (lambda g: g.recv([FLAT], 3, 0), ValueError, "src is 3, but the group has the ranks 0 to 2"),
}


def _rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def _reducing(options: Any, op: Any) -> Any:
    options.reduceOp = op
    return options


def refuse() -> list[str]:
    """Returns what is not refused as it should be."""
    found = []
    for name, (call, kind, text) in REFUSED.items():
        try:
            call(dist.group.WORLD)
        except kind as error:
            if not re.search(text, str(error)):
                found.append(f"{name}: {error}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
        else:
            found.append(f"{name}: accepted")
    return found


@pytest.mark.parametrize("backend", ENGINES)
def test_bad_arguments_are_refused_alike(group_on, backend):
    members = group_on(backend, SIZE)
    assert members[0].run(refuse) == []
    assert everywhere(members, total) == [3.0] * SIZE  # nothing was sent


# Calls that differ between the ranks. Rank 0 calls what is first, the others what is second.

Calls = tuple[Collective, Collective, str]


def _outputs(*sizes: int) -> list[Tensor]:
    return [torch.zeros(size) for size in sizes]


MISMATCHED: dict[str, Calls] = {
    "more for one rank": (
        lambda g: dist.all_to_all(_outputs(2, 2, 2), _outputs(2, 3, 2), group=g),
        lambda g: dist.all_to_all(_outputs(2, 2, 2), _outputs(2, 2, 2), group=g),
        "rank 0 calls all_to_all with 12 bytes for rank 1, which takes 8 bytes",
    ),
    "less for one rank": (
        lambda g: dist.all_to_all(_outputs(2, 2, 2), _outputs(2, 1, 2), group=g),
        lambda g: dist.all_to_all(_outputs(2, 2, 2), _outputs(2, 2, 2), group=g),
        "rank 0 calls all_to_all with 4 bytes for rank 1, which takes 8 bytes",
    ),
    "uneven split sizes": (
        lambda g: dist.all_to_all_single(torch.zeros(6), torch.ones(7), [2, 2, 2], [2, 2, 3], group=g),
        lambda g: dist.all_to_all_single(torch.zeros(6), torch.ones(6), group=g),
        "rank 0 calls all_to_all with 12 bytes for rank 2, which takes 8 bytes",
    ),
    "another whole": (
        lambda g: dist.all_to_all_single(torch.zeros(6), torch.ones(6), group=g),
        lambda g: dist.all_to_all_single(torch.zeros(3), torch.ones(3), group=g),
        "rank 0 calls all_to_all with 8 bytes for rank 1, which takes 4 bytes",
    ),
    "nothing to exchange": (
        lambda g: dist.all_to_all_single(torch.zeros(0), torch.ones(0), group=g),
        lambda g: dist.all_to_all_single(torch.zeros(3), torch.ones(3), group=g),
        "rank 0 calls all_to_all with 0 bytes for rank 1, which takes 4 bytes",
    ),
    "all_reduce of two sizes": (
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        lambda g: dist.all_reduce(torch.ones(4), group=g),
        "rank 0 calls all_reduce (sum of float32) of 12 bytes, but rank 1 calls all_reduce (sum of float32) of 16",
    ),
    "all_reduce of two dtypes": (
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        lambda g: dist.all_reduce(torch.ones(3).int(), group=g),
        "rank 0 calls all_reduce (sum of float32) of 12 bytes, but rank 1 calls all_reduce (sum of int32) of 12",
    ),
    "two reductions": (
        lambda g: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group=g),
        lambda g: dist.all_reduce(torch.ones(3), group=g),
        "rank 0 calls all_reduce (max of float32) of 12 bytes, but rank 1 calls all_reduce (sum of float32) of 12",
    ),
    "asynchronous calls of two sizes": (
        lambda g: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(),
        lambda g: dist.all_reduce(torch.ones(4), group=g, async_op=True).wait(),
        "rank 0 calls all_reduce (sum of float32) of 12 bytes, but rank 1 calls all_reduce (sum of float32) of 16",
    ),
    "broadcast of more": (
        lambda g: dist.broadcast(torch.ones(4), 0, group=g),
        lambda g: dist.broadcast(torch.ones(2), 0, group=g),
        "rank 0 calls broadcast with root 0 of 16 bytes, but rank 1 calls broadcast with root 0 of 8 bytes",
    ),
    "broadcast of less": (
        lambda g: dist.broadcast(torch.ones(2), 0, group=g),
        lambda g: dist.broadcast(torch.ones(4), 0, group=g),
        "rank 0 calls broadcast with root 0 of 8 bytes, but rank 1 calls broadcast with root 0 of 16 bytes",
    ),
    "reduce of two sizes": (
        lambda g: dist.reduce(torch.ones(3), 0, group=g),
        lambda g: dist.reduce(torch.ones(4), 0, group=g),
        "rank 1 calls reduce (sum of float32) with root 0 of 16 bytes, but rank 0 calls reduce (sum of float32)",
    ),
    "all_gather of two sizes": (
        lambda g: dist.all_gather(_outputs(4, 4, 4), torch.ones(4), group=g),
        lambda g: dist.all_gather(_outputs(2, 2, 2), torch.ones(2), group=g),
        "rank 0 calls all_gather of 16 bytes, but rank 1 calls all_gather of 8 bytes",
    ),
    "all_gather with other sizes than announced": (
        lambda g: dist.all_gather(_outputs(4, 2, 2), torch.ones(4), group=g),
        lambda g: dist.all_gather(_outputs(3, 2, 2), torch.ones(2), group=g),
        "rank 0 calls all_gather of 16 bytes, but rank 1 calls all_gather of 8 bytes and expects all_gather of 12",
    ),
    "gather of two sizes": (
        lambda g: dist.gather(torch.ones(2), _outputs(2, 2, 2), 0, group=g),
        lambda g: dist.gather(torch.ones(4), None, 0, group=g),
        "rank 1 calls gather with root 0 of 16 bytes, but rank 0 calls gather with root 0 of 8 bytes",
    ),
    "scatter of two sizes": (
        lambda g: dist.scatter(torch.ones(2), _outputs(2, 2, 2), 0, group=g),
        lambda g: dist.scatter(torch.ones(4), None, 0, group=g),
        "rank 0 calls scatter with root 0 of 8 bytes, but rank 1 calls scatter with root 0 of 16 bytes",
    ),
    "reduce_scatter of two sizes": (
        lambda g: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6), group=g),
        lambda g: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(12), group=g),
        "rank 0 calls reduce_scatter (sum of float32) of 24 bytes, but rank 1 calls reduce_scatter (sum of",
    ),
    "reduce_scatter of other parts": (
        lambda g: dist.reduce_scatter(torch.ones(1), _outputs(1, 2, 3), group=g),
        lambda g: dist.reduce_scatter(torch.ones(2), _outputs(2, 2, 2), group=g),
        "of 24 bytes in unequal parts",
    ),
    "two operations": (
        lambda g: dist.broadcast(torch.ones(3), 0, group=g),
        lambda g: dist.barrier(group=g),
        "rank 0 calls broadcast with root 0 of 12 bytes, but rank 1 calls barrier",
    ),
}


def call_differently() -> dict[str, list[str]]:
    """Returns for each of MISMATCHED what this rank's call, and one after it, have raised."""
    found: dict[str, list[str]] = {}
    for name, (first, second, _) in MISMATCHED.items():
        group = dist.new_group()
        errors = found.setdefault(name, [])
        for call in (second if dist.get_rank() else first), (lambda g: dist.barrier(group=g)):
            try:
                call(group)
            except (CollectiveMismatchError, RankLostError) as error:
                errors.append(str(error))
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo", "gradwire_mpi"])
def test_calls_that_differ_are_errors_that_say_how(group_on, backend):
    members = group_on(backend, SIZE)
    everywhere(members, sleep_at_once)
    found = everywhere(members, call_differently)
    for name, (_, _, text) in MISMATCHED.items():
        assert all(errors[name] for errors in found), name
        assert text in " ".join(each for errors in found for each in errors[name]), name
    assert everywhere(members, total) == [3.0] * SIZE
