"""Groups on the NCCL engine with fakes: torch's own functions, and several GPUs for each process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d

from tests.c10d.members import everywhere

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

BACKEND = "fake_nccl"
"""The backend of the groups that the fixture `group` makes."""


def outcomes(dtypes: list[torch.dtype]) -> dict[str, str]:
    from tests.c10d.operations import NO_TENSORS, OPERATIONS, expected_refusal, outcome

    wrong = {}
    for name in sorted(OPERATIONS.keys() - {"recv_from_any"}):
        for dtype in [torch.float32] if name in NO_TENSORS else dtypes:
            result = outcome(name, dtype, dist.group.WORLD, thorough=False)
            wanted = "ok" if expected_refusal(name, dtype) is None else "refused"
            if result.partition(":")[0] != wanted:
                wrong[f"{name} {dtype}"] = result
    return wrong


@pytest.mark.parametrize("dtypes", [[torch.float32, torch.bool], [torch.uint16, torch.complex64]], ids=str)
def test_all_operations_of_torch_come_out_right(group, dtypes):
    assert everywhere(group(2), outcomes, dtypes) == [{}, {}]


def trained(names: list[str]) -> list[list[torch.Tensor]]:
    from tests.c10d.groups import trainings

    return [trainings.run(name) for name in names]


def trained_on_gloo(path: Path, rank: int, names: list[str]) -> list[list[torch.Tensor]]:
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
    return trained(names)


def test_what_torch_builds_on_groups_trains_as_on_gloo(group, tmp_path):
    names = ["ddp", "ddp_sparse", "fsdp2", "pipeline_1f1b"]
    members = group(2)
    ours = everywhere(members, trained, names)
    started = [
        member.start(trained_on_gloo, tmp_path / "gloo", rank, names) for rank, member in enumerate(members)
    ]
    torch.testing.assert_close(ours, [pending.result() for pending in started])


def premultiplied() -> list[float]:
    tensor = torch.tensor([2.0, 4.0])
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.25))
    return tensor.tolist()


def test_premultiplied_sums(group):
    results = everywhere(group(2), premultiplied)
    assert results == [[1.0, 2.0]] * 2


def sum_sparse() -> list[float]:
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,))
    dist.all_reduce(tensor)
    return tensor.to_dense().tolist()


def test_sparse_tensors(group):
    results = everywhere(group(2), sum_sparse)
    assert results == [[1.0, 1.0, 4.0, 0.0]] * 2


def on_two_gpus(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    gpus = dist.group.WORLD.engine("cpu")._gpus
    return [gpus.put(tensor, gpu) for gpu, tensor in enumerate(tensors)]


def use_two_gpus() -> dict[str, Any]:
    rank = dist.get_rank()
    library = dist.group.WORLD.engine("cpu")._library
    results: dict[str, Any] = {}
    tensors = on_two_gpus([torch.full((2,), float(10 * rank + gpu)) for gpu in range(2)])
    c10d.all_reduce_multigpu(tensors)
    results["all_reduce"] = [tensor.tolist() for tensor in tensors]
    results["calls"] = [call[:2] for call in library.calls]

    tensors = on_two_gpus([torch.full((2,), float(10 * rank + gpu)) for gpu in range(2)])
    work = c10d.broadcast_multigpu(tensors, 1, async_op=True, src_tensor=1)
    work.wait()
    assert work.is_completed()
    results["broadcast"] = [tensor.tolist() for tensor in tensors]

    tensors = on_two_gpus([torch.full((1,), float(10 * rank + gpu)) for gpu in range(2)])
    c10d.reduce_multigpu(tensors, 0, dist.ReduceOp.MAX, dst_tensor=1)
    results["reduce"] = tensors[1].tolist()

    inputs = on_two_gpus([torch.full((1,), float(10 * rank + gpu)) for gpu in range(2)])
    outputs = [[torch.zeros(1) for _ in range(4)] for _ in range(2)]
    c10d.all_gather_multigpu(outputs, inputs)
    results["all_gather"] = [[output.item() for output in each] for each in outputs]

    inputs = [[torch.full((1,), float(10 * rank + gpu + 100 * to)) for to in range(4)] for gpu in range(2)]
    tensors = on_two_gpus([torch.zeros(1), torch.zeros(1)])
    c10d.reduce_scatter_multigpu(tensors, inputs)
    results["reduce_scatter"] = [tensor.item() for tensor in tensors]
    dist.barrier()
    return results


def test_processes_with_two_gpus_each(group):
    first, second = everywhere(group(2), use_two_gpus)
    assert first["calls"] == [
        ("groupStart",),
        ("NcclCommunicator", 4),
        ("NcclCommunicator", 4),
        ("groupEnd",),
        ("groupStart",),
        ("allReduce", 0),
        ("allReduce", 1),
        ("groupEnd",),
    ]
    for results in (first, second):
        assert results["all_reduce"] == [[22.0, 22.0]] * 2
        assert results["broadcast"] == [[11.0, 11.0]] * 2
        assert results["all_gather"] == [[0.0, 1.0, 10.0, 11.0]] * 2
    assert first["reduce"] == [11.0]
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([22.0, 422.0], [822.0, 1222.0])


def refuse_for_several_gpus() -> None:
    with pytest.raises(ValueError, match="one tensor on each GPU"):
        c10d.all_reduce_multigpu([torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match="of one size and dtype"):
        c10d.all_reduce_multigpu([torch.ones(1), torch.ones(2)])
    with pytest.raises(ValueError, match="src_tensor is 1, but there are 1 tensors"):
        c10d.broadcast_multigpu([torch.ones(1)], 0, src_tensor=1)
    with pytest.raises(ValueError, match="outputs for each of the 2 ranks"):
        c10d.all_gather_multigpu([[torch.ones(1)]], [torch.ones(1)])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2


def test_tensors_that_do_not_fit_are_refused_and_the_group_goes_on(group):
    everywhere(group(2), refuse_for_several_gpus)
