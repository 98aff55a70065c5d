"""Ranks of a process group, each in a worker process, and functions that tests of all engines run on them."""

import importlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradwire.c10d import FileStore

from tests.c10d import operations
from tests.workers import RESULT_TIMEOUT_S, Worker

MIB = 2**20

JOIN_TIMEOUT = timedelta(seconds=300)
"""Of forming a group, and of its operations unless a test says otherwise. Tests end before that."""

TEST_ENGINES = {"fake_nccl": "tests.c10d.engines.fake_nccl", "slow_store": "tests.c10d.store_engine"}
"""The modules that register engines of the tests, by backend."""

opened: list[Any] = []
"""Stores of this process's groups, which must stay open."""


def join(path: Path, rank: int, size: int, backend: str, seconds: float | None = None) -> None:
    """Makes the default process group of this worker process, whose operations time out after `seconds`."""
    if backend in TEST_ENGINES:
        importlib.import_module(TEST_ENGINES[backend])
    store = FileStore(str(path), size)
    opened.append(store)
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT)
    if seconds is not None:
        dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


def join_all(members: Sequence[Worker], path: Path, backend: str, seconds: float | None = None) -> None:
    """Makes the default process group of these workers, whose operations time out after `seconds`."""
    pending = [each.start(join, path, rank, len(members), backend, seconds) for rank, each in enumerate(members)]
    for each in pending:
        each.result()


def everywhere(
    members: Sequence[Worker], function: Callable[..., Any], *args: Any, seconds: float = RESULT_TIMEOUT_S
) -> list[Any]:
    """Runs a function on all workers at the same time, and returns its results, for which it waits `seconds`."""
    return [pending.result(seconds) for pending in [member.start(function, *args) for member in members]]


def leave() -> None:
    dist.destroy_process_group()
    opened.pop().close()


def total() -> float:
    """Returns the sum of the ranks, by all_reduce."""
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor)
    return tensor.item()


def wrong_cells() -> list[str]:
    """Returns which cells of the table of operations have a wrong outcome."""
    found = []
    for name, dtype, came in operations.outcomes(dist.group.WORLD, operations.DTYPES_OF_EACH_KIND, thorough=False):
        wanted = "refused" if operations.expected_refusal(name, dtype) else "ok"
        if came.partition(":")[0] != wanted:
            found.append(f"{name} of {dtype}: {came}")
    return found


def reduce_until_it_fails(dies: int) -> None:
    """All ranks reduce 64 MiB again and again; one is killed when the third time has begun."""
    tensor = torch.ones(16 * MIB)
    for number in itertools.count(1):
        work = dist.all_reduce(tensor, async_op=True)
        if dist.get_rank() == dies and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        work.wait()  # on a loaded machine the others may have finished the third, but not the fourth


def receive(source: int | None, tag: int = 0) -> tuple[int, float]:
    tensor = torch.zeros(1)
    return dist.recv(tensor, source, tag=tag), tensor.item()


def send(to: int, tag: int = 0) -> None:
    dist.send(torch.tensor([float(dist.get_rank())]), to, tag=tag)


def reduce_within(seconds: float) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    dist.group.WORLD.allreduce([torch.ones(3)], options).wait()


def sum_in_group_of(*ranks: int) -> float | None:
    """Returns the sum of these ranks (in the default group) in a new group of them; None on other ranks."""
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return None
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor.item()


def future_of_a_sum() -> float:
    """Waits for the future of an all_reduce, but not for its Work."""
    work = dist.all_reduce(torch.ones(3), async_op=True)
    return work.get_future().wait()[0].sum().item()


def collect_in_place() -> list[float]:
    """Uses inputs that are part of the outputs, as FSDP does, and outputs that are part of the inputs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.full((2 * size,), float(rank))
    dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
    gathered = whole.tolist()
    part = whole[2 * rank : 2 * rank + 2]
    dist.reduce_scatter_tensor(part, whole)
    return gathered + part.tolist()


def numbers(*seed: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns random numbers that are the same in every process for a seed."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)
