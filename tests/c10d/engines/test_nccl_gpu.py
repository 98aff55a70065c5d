"""The NCCL engine on the GPUs of this machine, one rank on each. Skipped where there are none."""

import importlib.util
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.errors import CollectiveTimeoutError, GroupAbortedError, ProcessGroupError
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.c10d.operations import DTYPES, NO_TENSORS, OPERATIONS, expected_refusal, outcome

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no GPU here"),
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None, reason="cupy is missing: pip install cupy-cuda13x"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
several = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def join(path: Path, rank: int, size: int, seconds: float = 120) -> None:
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    c10d.init_process_group(
        "nccl",
        f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=torch.device("cuda", rank),
    )


@pytest.fixture
def group(workers, tmp_path):
    """Starts a worker for each GPU, or `size` workers."""

    def start(size: int = GPUS, **options: float) -> list[Any]:
        members = workers(size)
        pending = [
            member.start(join, tmp_path / "met", rank, size, **options) for rank, member in enumerate(members)
        ]
        for each in pending:
            each.result()
        return members

    return start


def everywhere(members, function, *args, **options):
    pending = [member.start(function, *args, **options) for member in members]
    return [each.result(590) for each in pending]


def wrong_outcomes(names: list[str]) -> dict[str, str]:
    """Returns the unexpected outcomes of these operations on every dtype."""
    wrong = {}
    for name in names:
        for dtype in [torch.float32] if name in NO_TENSORS else DTYPES:
            refused = expected_refusal(name, dtype) is not None
            refused = refused or (name == "send_and_recv" and dist.get_world_size() == 1)  # to the rank itself
            result = outcome(name, dtype, dist.group.WORLD)
            if result.partition(":")[0] != ("refused" if refused else "ok"):
                wrong[f"{name} {dtype}"] = result
    return wrong


@pytest.mark.parametrize("start", range(0, len(OPERATIONS), 8))
def test_every_operation_on_every_dtype(group, start):
    names = sorted(OPERATIONS.keys() - {"recv_from_any"})[start : start + 8]  # NCCL has no such messages
    assert everywhere(group(), wrong_outcomes, names) == [{}] * GPUS


def reduce_behind_a_long_kernel() -> tuple[bool, float]:
    tensor = torch.zeros(1 << 20)
    dist.all_reduce(tensor)  # creates the communicator
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    tensor.fill_(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    early = not work.is_completed()  # the caller returned while the GPU was still busy
    doubled = tensor * 2
    return early, doubled.max().item()


def test_the_callers_stream_waits_and_the_caller_does_not(group):
    assert everywhere(group(), reduce_behind_a_long_kernel) == [(True, 2.0 * GPUS)] * GPUS


def reuse_memory() -> float:
    """Frees the inputs of collectives immediately, so that the allocator hands out their memory again."""
    outputs = []
    for step in range(50):
        output = torch.empty(dist.get_world_size() << 16)
        dist.all_gather_into_tensor(output, torch.full((1 << 16,), float(step)), async_op=True)
        torch.full((1 << 16,), -1.0)
        outputs.append(output)
    dist.barrier()
    return max((output - step).abs().max().item() for step, output in enumerate(outputs))


def test_memory_is_not_reused_too_early(group):
    assert everywhere(group(), reuse_memory) == [0.0] * GPUS


def futures() -> list[float]:
    tensor = torch.ones(3)
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    return doubled.wait().tolist()


def test_futures(group):
    assert everywhere(group(), futures) == [[2.0 * GPUS] * 3] * GPUS


def train() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 2), float(dist.get_rank() + step))).sum().backward()
        optimizer.step()
    return model.module.weight.view(-1).tolist()


def test_ddp_trains_on_it(group):
    trained = everywhere(group(), train)
    assert all(weights == trained[0] for weights in trained)


def split() -> float:
    part = torch.distributed.split_group(split_ranks=[[rank] for rank in range(dist.get_world_size())])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=part)
    return tensor.item()


def test_torchs_own_function_splits_a_group(group):
    assert everywhere(group(), split) == [1.0] * GPUS


def abort_in_flight() -> None:
    dist.all_reduce(torch.ones(1))
    torch.cuda._sleep(1_000_000_000)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    dist.group.WORLD.abort()
    with pytest.raises(GroupAbortedError):
        work.wait()


def test_an_abort_ends_operations_in_flight(group):
    group(1)[0].run(abort_in_flight)


def use_all_gpus_of_the_process() -> list[list[float]]:
    tensors = [torch.full((2,), float(gpu + 1), device=f"cuda:{gpu}") for gpu in range(GPUS)]
    c10d.all_reduce_multigpu(tensors)
    outputs = [[torch.zeros(1, device=f"cuda:{gpu}") for _ in range(GPUS)] for gpu in range(GPUS)]
    c10d.all_gather_multigpu(outputs, [torch.full((1,), float(gpu), device=f"cuda:{gpu}") for gpu in range(GPUS)])
    return [tensor.tolist() for tensor in tensors] + [[each.item() for each in parts] for parts in outputs]


def test_one_process_with_all_gpus(group):
    total = GPUS * (GPUS + 1) / 2
    wanted = [[total, total]] * GPUS + [[float(gpu) for gpu in range(GPUS)]] * GPUS
    assert group(1)[0].run(use_all_gpus_of_the_process) == wanted


def reduce_alone() -> str:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank():
        return ""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(CollectiveTimeoutError) as info:
        work.wait(timedelta(seconds=60))
    with pytest.raises(CollectiveTimeoutError):
        dist.all_reduce(torch.ones(1))
    return str(info.value)


@several
def test_a_missing_rank_is_a_timeout(group):
    assert "all_reduce timed out after 2 s" in everywhere(group(seconds=2), reduce_alone)[0]


def share_a_gpu() -> str:
    torch.cuda.set_device(0)
    with pytest.raises(ProcessGroupError) as info:
        dist.all_reduce(torch.ones(1, device="cuda:0"))
    return str(info.value)


@several
def test_two_ranks_on_one_gpu_are_refused(group):
    assert all("both use GPU" in text for text in everywhere(group(2), share_a_gpu))
