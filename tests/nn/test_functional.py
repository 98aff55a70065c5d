"""Differentiable collectives, compared with the same computation in one process that has all tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import autograd, rpc
from gradwire.nn import functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from tests.c10d.members import join_all

Inputs = list[list[Tensor]]
"""The tensors of each rank."""


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def gloo_group(group_on, request):
    """Workers in a group on torch's Gloo."""
    return group_on("gloo", request.param)


def tensor(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def inputs(size: int, rank: int, count: int = 1, shape: tuple[int, ...] = (3, 4)) -> list[Tensor]:
    return [tensor(*shape, seed=rank * size + index) for index in range(count)]


def transposed(size: int, rank: int, count: int = 1) -> list[Tensor]:
    """Returns the same tensors as `inputs`, not contiguous."""
    return [each.t().contiguous().t() for each in inputs(size, rank, count)]


def loss_of(results: list[Tensor], rank: int) -> Tensor:
    """Returns a nonlinear loss in which every element of every result of every rank has another weight."""
    return sum(
        (
            (0.1 * rank + index + torch.linspace(1, 2, result.numel(), dtype=torch.float64).view(result.shape))
            * result**2
        ).sum()
        for index, result in enumerate(results)
    )


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def run_distributed(collective: Any, make: Any, count: Any) -> tuple[list[Tensor], ...]:
    """Returns this rank's results, gradients, and second-order gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = [each.requires_grad_() for each in make(size, rank, count(size))]
    before = [each.detach().clone() for each in mine]
    results = as_tuple(collective(mine, size, rank))
    loss = loss_of(list(results), rank) + loss_of(list(as_tuple(collective(mine, size, rank))), rank + 1)
    gradients = torch.autograd.grad(loss, mine, create_graph=True)
    second = torch.autograd.grad(loss_of(list(gradients), rank), mine)
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    return [r.detach() for r in results], [g.detach() for g in gradients], list(second)


def run_here(simulated: Any, make: Any, count: Any, size: int) -> list[tuple[list[Tensor], ...]]:
    """Returns the same for all ranks, computed in this process."""
    everything = [[each.requires_grad_() for each in make(size, rank, count(size))] for rank in range(size)]
    leaves = [each for mine in everything for each in mine]
    results = [list(as_tuple(each)) for each in simulated(everything)]
    loss = sum(loss_of(mine, rank) + loss_of(mine, rank + 1) for rank, mine in enumerate(results))
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    n = len(everything[0])
    per_rank = [list(gradients[n * rank : n * rank + n]) for rank in range(size)]
    second = torch.autograd.grad(
        sum(loss_of(mine, rank) for rank, mine in enumerate(per_rank)), leaves, materialize_grads=True
    )
    return [
        (
            [r.detach() for r in results[rank]],
            [g.detach() for g in per_rank[rank]],
            list(second[n * rank : n * rank + n]),
        )
        for rank in range(size)
    ]


def compare(
    group: list[Any],
    collective: Any,
    simulated: Any,
    count: Any = lambda size: 1,
    makers: Any = (inputs, transposed),
) -> None:
    """Are results, gradients and second gradients the same?

    Args:
        group: the processes.
        collective: a process's results, from its tensors, the number of processes and its rank.
        simulated: all processes' results, from all their tensors.
        count: how many tensors a process has.
        makers: functions that make the tensors.
    """
    for make in makers:
        pending = [worker.start(run_distributed, collective, make, count) for worker in group]
        for process, expected in zip(pending, run_here(simulated, make, count, len(group)), strict=True):
            for ours, theirs in zip(process.result(), expected, strict=True):
                assert len(ours) == len(theirs)
                for a, b in zip(ours, theirs, strict=True):
                    assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def reduced(tensors: list[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(tensors)
    functions: dict[Any, Callable[..., Tensor]] = {
        ReduceOp.SUM: torch.sum,
        ReduceOp.AVG: torch.mean,
        ReduceOp.PRODUCT: torch.prod,
        ReduceOp.MIN: torch.amin,
        ReduceOp.MAX: torch.amax,
    }
    return functions[op](stacked, 0)


OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


def zeros_like(tensors: Any) -> list[Tensor]:
    return [torch.zeros_like(each) for each in tensors]


def test_broadcast(gloo_group):
    compare(
        gloo_group,
        lambda mine, size, rank: F.broadcast(mine[0], 1),
        lambda everything: [everything[1][0] for _ in everything],
    )


def test_gather(gloo_group):
    def simulated(everything: Inputs) -> list[list[Tensor]]:
        parts = [mine[0] for mine in everything]
        return [parts if rank == 1 else zeros_like(parts) for rank in range(len(everything))]

    compare(gloo_group, lambda mine, size, rank: F.gather(mine[0], 1), simulated)


def test_scatter(gloo_group):
    compare(
        gloo_group,
        lambda mine, size, rank: F.scatter(mine, 1),
        lambda everything: everything[1],
        lambda size: size,
    )


def test_all_gather(gloo_group):
    compare(
        gloo_group,
        lambda mine, size, rank: F.all_gather(mine[0]),
        lambda everything: [[mine[0] for mine in everything] for _ in everything],
    )


def test_all_gather_into_one_tensor(gloo_group):
    compare(
        gloo_group,
        lambda mine, size, rank: F._all_gather_base(mine[0].new_empty(3 * size, 4), mine[0]),
        lambda everything: [torch.cat([mine[0] for mine in everything]) for _ in everything],
    )


def test_reduce(gloo_group):
    for op in OPS:

        def simulated(everything: Inputs, op: Any = op) -> list[Tensor]:
            total = reduced([mine[0] for mine in everything], op)
            return [total if rank == 1 else torch.zeros_like(total) for rank in range(len(everything))]

        compare(gloo_group, lambda mine, size, rank, op=op: F.reduce(mine[0], 1, op), simulated)


def all_reduced(op: Any) -> Callable[[Inputs], list[Tensor]]:
    return lambda everything: [reduced([mine[0] for mine in everything], op)] * len(everything)


def test_all_reduce(gloo_group):
    for op in OPS:
        compare(gloo_group, lambda mine, size, rank, op=op: F.all_reduce(mine[0], op), all_reduced(op))


def with_ties_and_zeros(size: int, rank: int, count: int = 1) -> list[Tensor]:
    """Every combination of -1, 0 and 1 on the processes."""
    values = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)] * size)
    return [values[:, rank].clone()]


def test_ties_and_zeros(gloo_group):
    for op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        compare(
            gloo_group,
            lambda mine, size, rank, op=op: F.all_reduce(mine[0], op),
            all_reduced(op),
            makers=[with_ties_and_zeros],
        )


def test_reduce_scatter(gloo_group):
    for op in OPS:
        compare(
            gloo_group,
            lambda mine, size, rank, op=op: F.reduce_scatter(mine[0].new_empty(3, 4), mine, op),
            lambda everything, op=op: [reduced(list(parts), op) for parts in zip(*everything, strict=True)],
            lambda size: size,
        )


def of_many_shapes(size: int, rank: int, count: int = 1) -> list[Tensor]:
    return [tensor(rank + 1, to, seed=10 * rank + to) for to in range(size)]  # one of them is empty


def test_all_to_all(gloo_group):
    def collective(mine: list[Tensor], size: int, rank: int) -> tuple[Tensor, ...]:
        outputs = [mine[0].new_empty(source + 1, rank) for source in range(size)]
        results = F.all_to_all(outputs, mine)
        assert all(torch.equal(a, b) for a, b in zip(outputs, results, strict=True))
        return results

    def simulated(everything: Inputs) -> list[list[Tensor]]:
        return [[mine[rank] for mine in everything] for rank in range(len(everything))]

    compare(gloo_group, collective, simulated, lambda size: size, [of_many_shapes])


@pytest.mark.parametrize("equal", [True, False])
def test_all_to_all_single(gloo_group, equal):
    def rows(size: int, source: int, to: int) -> int:
        return 2 if equal else source + 2 * to

    def make(size: int, rank: int, count: int) -> list[Tensor]:
        total = sum(rows(size, rank, to) for to in range(size))
        return [tensor(2, total, seed=rank).t()]

    def collective(mine: list[Tensor], size: int, rank: int) -> Tensor:
        send = [rows(size, rank, to) for to in range(size)]
        receive = [rows(size, source, rank) for source in range(size)]
        output = mine[0].new_empty(sum(receive), 2)
        sizes = () if equal else (receive, send)
        result = F.all_to_all_single(output, mine[0], *sizes)
        assert torch.equal(output, result)
        assert result.data_ptr() == output.data_ptr()
        assert not output.requires_grad
        return result

    def simulated(everything: Inputs) -> list[Tensor]:
        size = len(everything)
        sent = [
            mine[0].split([rows(size, rank, to) for to in range(size)]) for rank, mine in enumerate(everything)
        ]
        return [torch.cat([parts[rank] for parts in sent]) for rank in range(size)]

    compare(gloo_group, collective, simulated, makers=[make])


def test_some_of_the_processes(workers, group_on):
    """Ranks are those among all processes, as everywhere in torch.distributed."""

    def check() -> None:
        some = dist.new_group([1, 2])
        rank = dist.get_rank()
        x = torch.tensor([rank + 1.0], requires_grad=True)
        calls: list[Callable[[], Any]] = [
            lambda: F.all_reduce(x, group=some),
            lambda: F.reduce(x, 2, group=some),
            lambda: F.broadcast(x, 2, some),
            lambda: F.gather(x, 2, some),
            lambda: F.scatter([x, x * 10], 2, some),
            lambda: F.all_gather(x, some),
            lambda: F.reduce_scatter(torch.empty(1), [x, x * 10], group=some),
            lambda: F.all_reduce(x, ReduceOp.PRODUCT, some),
        ]
        if rank == 0:
            for call in calls:
                with pytest.raises(ValueError, match="rank 0 is not in the group"):
                    call()
            return
        found = []
        for call in calls:
            result = torch.cat(as_tuple(call()))
            (gradient,) = torch.autograd.grad(rank * result.sum(), x)
            found.append((result.tolist(), gradient.item()))
        assert (
            found
            == [
                [([5], 3), ([0], 2), ([3], 0), ([0, 0], 2), ([3], 0), ([2, 3], 3), ([5], 21), ([6], 9)],
                [([5], 3), ([5], 2), ([3], 3), ([2, 3], 2), ([30], 21), ([2, 3], 3), ([50], 21), ([6], 6)],
            ][rank - 1]
        )

    workers.each(group_on("gloo", 3), check)


def test_integers_and_what_has_no_gradient(workers, group_on):
    def check() -> None:
        rank = dist.get_rank()
        x = torch.tensor([1 << rank])
        assert F.all_reduce(x, ReduceOp.BOR).item() == 3
        assert F.reduce(x, 0, ReduceOp.BXOR).item() == (3 if rank == 0 else 0)
        assert F.all_reduce(x, ReduceOp.MAX).item() == 2
        y = torch.ones(1)
        for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, dist._make_nccl_premul_sum(2.0)):
            for call in (
                lambda op=op: F.all_reduce(y, op),
                lambda op=op: F.reduce(y, 0, op),
                lambda op=op: F.reduce_scatter(y, [y, y], op),
            ):
                with pytest.raises(ValueError, match="has no gradient: use SUM, AVG, PRODUCT, MIN or MAX"):
                    call()

    workers.each(group_on("gloo", 2), check)


def test_bad_arguments(workers, group_on):
    """Found before anything is sent, so that no process waits for another."""

    def check() -> None:
        x = torch.ones(4)
        with pytest.raises(ValueError, match="tensors has 1 tensors: give one for each of the group's 2"):
            F.scatter([x])
        with pytest.raises(ValueError, match=r"tensors\[0\] is a torch.float32 of shape \(4,\), but tensors\[1\]"):
            F.scatter([x, x.double()])
        with pytest.raises(ValueError, match=r"input_list\[0\].* of shape \(4,\), but .* of shape \(2, 2\): give"):
            F.reduce_scatter(x, [x, x.view(2, 2)])
        with pytest.raises(ValueError, match="output_tensor_list has 3 tensors"):
            F.all_to_all([x, x, x], [x, x])
        with pytest.raises(ValueError, match="input_tensor_list has 0 tensors"):
            F.all_to_all([x, x], [])
        with pytest.raises(ValueError, match="input has 3 rows, which 2 ranks cannot share evenly"):
            F.all_to_all_single(x, x[:3])
        with pytest.raises(ValueError, match=r"output_split_sizes is \[1, 2\]: give 2 numbers whose sum is 4"):
            F.all_to_all_single(x, x, [1, 2], [2, 2])
        with pytest.raises(ValueError, match=r"output_tensor of shape \(4, 2\) is not contiguous"):
            F._all_gather_base(torch.ones(2, 4).t(), torch.ones(2, 2))

    workers.each(group_on("gloo", 2), check)


def test_a_buffer_that_is_filled_again_too_early(workers, group_on):
    """The operation overwrites what a graph has saved; the backward pass says so, as torch does."""

    def check() -> None:
        x, output = torch.ones(1, requires_grad=True), torch.empty(2)
        first = F._all_gather_base(output, x).square().sum()
        F._all_gather_base(output, 2 * x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()

    workers.each(group_on("gloo", 2), check)


def scaled_sum(weight: float, x: Tensor) -> Tensor:
    return F.all_reduce(x * weight).square().sum()


def test_collectives_inside_remote_functions(workers):
    """In the backward pass of a context all workers run at once, so their collectives meet."""
    started = workers.rpc(3)
    join_all(started, workers.folder / "group", "gloo")

    def check() -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        for _ in range(3):
            with autograd.context() as context_id:
                calls = [rpc.rpc_async(f"worker{rank}", scaled_sum, (rank + 1.0, x)) for rank in range(3)]
                autograd.backward(context_id, [sum(call.wait() for call in calls)])
                # Three times the sum of (6 x)², whose gradient is 72 x.
                assert torch.equal(autograd.get_gradients(context_id)[x], 3 * 72 * x.detach())

    started[0].run(check)
