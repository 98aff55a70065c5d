"""Process groups, on a third-party engine that works through the store."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d import register_engine
from gradwire.c10d.engines import Engine
from gradwire.c10d.engines.reductions import Reduction
from gradwire.errors import (
    CollectiveMismatchError,
    GroupAbortedError,
    ProcessGroupError,
    UnsupportedOperationError,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.c10d.members import everywhere, join, join_all
from tests.c10d.store_engine import StoreEngine

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11


BACKEND = "slow_store"
"""The backend of the groups that the fixture `group` makes."""


def sum_of_ranks() -> list[float]:
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.get_future().wait()[0] is tensor
    return tensor.tolist()


def test_torchs_collectives_run_on_a_group(group):
    assert everywhere(group(3), sum_of_ranks) == [[9.0] * 3] * 3


def describe() -> tuple[str, str, str]:
    world = dist.group.WORLD
    return dist.get_backend(), world.name(), world.group_name


def test_torch_knows_the_backend_by_name(group):
    assert everywhere(group(2), describe) == [("slow_store", "slow_store", "0")] * 2


def train() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.full((2, 2), float(dist.get_rank() + step))).sum().backward()
        optimizer.step()
    return model.module.weight.view(-1).tolist()


def test_ddp_trains_on_a_group(group):
    first, second = everywhere(group(2), train)
    assert first == second
    torch.manual_seed(0)
    alone = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        (sum(alone(torch.full((2, 2), float(rank + step))).sum() for rank in range(2)) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(torch.tensor(first), alone.weight.detach().view(-1))


def use_sub_groups() -> list[float]:
    even, odd = dist.new_group([0, 2]), dist.new_group([1])
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor, group=odd if dist.get_rank() % 2 else even)
    dist.destroy_process_group(odd if dist.get_rank() % 2 else even)
    return tensor.tolist()


def test_sub_groups(group):
    assert everywhere(group(3), use_sub_groups) == [[4.0], [2.0], [4.0]]


def receive_late() -> int:
    received = torch.zeros(2)
    pending = dist.irecv(received, 1, tag=5)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # not blocked by the receive
    pending.wait()
    return int(received.sum())


def send_late() -> int:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.send(torch.tensor([3.0, 4.0]), 0, tag=5)
    return int(tensor)


def test_a_receive_in_flight_does_not_block_collectives(group):
    first, second = group(2)
    received, sent = first.start(receive_late), second.start(send_late)
    assert (received.result(), sent.result()) == (7, 2)


def reduce_alone() -> str:
    tensor = torch.ones(2)
    with pytest.raises(RuntimeError):  # this engine raises the store's timeout as it is
        dist.all_reduce(tensor)
    with pytest.raises(RuntimeError) as again:
        dist.barrier()
    return str(again.value)


def test_a_failed_group_stays_failed_and_can_be_made_again(group, tmp_path):
    members = group(2, seconds=0.3)
    assert "timed out" in members[0].run(reduce_alone)
    everywhere(members, dist.destroy_process_group)
    join_all(members, tmp_path / "another", BACKEND)
    assert everywhere(members, sum_of_ranks) == [[2.0] * 3] * 2


def disagree(other: bool) -> Exception:
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if other else torch.float32))
    except ProcessGroupError as error:
        return error
    raise AssertionError("it came out")


def test_ranks_whose_calls_differ_are_told(group):
    """An engine that compared no dtypes would add the bytes of one to those of another."""
    members = group(2)
    calling = [each.start(disagree, rank == 1) for rank, each in enumerate(members)]
    errors = [each.result() for each in calling]
    assert any(isinstance(each, CollectiveMismatchError) for each in errors)


def abort() -> None:
    world = dist.group.WORLD
    world.abort()
    with pytest.raises(GroupAbortedError, match="rank 0 aborted"):
        world.barrier()


def test_operations_of_an_aborted_group_raise(group):
    group(2)[0].run(abort)


def refuse() -> None:
    world = dist.group.WORLD
    with pytest.raises(UnsupportedOperationError, match="engine 'store' cannot reduce"):
        dist.reduce(torch.ones(2), 0)
    with pytest.raises(ValueError, match="band.*float32"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="one dtype on one device"):
        world.allgather([[torch.ones(1), torch.ones(1, dtype=torch.int64)]], [torch.ones(1)])
    with pytest.raises(ValueError, match=r"outputs for each of the 2 ranks, but got 1"):
        world.allgather([[torch.ones(1)]], [torch.ones(1)])
    with pytest.raises(ValueError, match="root is 2, but the group has the ranks 0 to 1"):
        world.broadcast(torch.ones(1), 2)
    with pytest.raises(ValueError, match="dst is -1"):
        world.send([torch.ones(1)], -1)
    with pytest.raises(ValueError, match="2 times the elements"):
        world.all_gather_single(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match="3 rows of the output cannot be split evenly among 2"):
        world.all_to_all_single(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="split sizes"):
        world.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2])
    with pytest.raises(ValueError, match="dense tensors"):
        world.broadcast(torch.ones(2).to_sparse(), 0)
    with pytest.raises(ValueError, match="no backend for meta tensors"):
        world.broadcast(torch.ones(2, device="meta"), 0)
    with pytest.raises(ValueError, match="positive timedelta"):
        world.set_timeout(timedelta(0))


def test_bad_arguments_are_refused_and_the_group_stays_usable(group):
    members = group(2)
    everywhere(members, refuse)
    assert everywhere(members, sum_of_ranks) == [[2.0] * 3] * 2


@pytest.mark.parametrize("name", ["cpu:mine", "a,b", ""])
def test_a_name_that_torch_would_misread_is_refused(name):
    with pytest.raises(ValueError, match="an engine cannot be called"):
        register_engine(name, StoreEngine)


def test_an_engine_for_no_device_is_refused():
    with pytest.raises(ValueError, match="for no device"):
        register_engine("nowhere", StoreEngine, devices=[])


def test_the_documented_engine_is_the_one_tested_here():
    root = Path(__file__).parents[3]
    code = (root / "tests/c10d/store_engine.py").read_text()
    assert f"```python\n{code}```" in (root / "docs/engines.md").read_text()


def wait_for_the_other_rank() -> None:
    dist.group.WORLD.engine("cpu").store.wait(["1/0"])


def be_interrupted() -> str:
    with pytest.raises(KeyboardInterrupt):
        dist.barrier()  # the other rank does not call it
    with pytest.raises(GroupAbortedError) as again:
        dist.barrier()
    return str(again.value)


def test_an_interrupt_in_a_collective_fails_the_group(group):
    interrupted, other = group(2)
    pending = interrupted.start(be_interrupted)
    other.run(wait_for_the_other_rank)
    os.kill(interrupted.pid, signal.SIGINT)
    assert pending.result() == "rank 0 was interrupted in barrier"


class Recorder(Engine):
    """An engine that records the tensors it is given."""

    name = "recorder"
    seen: ClassVar[list[str]] = []

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, timeout: float) -> None:
        self.seen.append(f"{tensor.device} {reduction.name}")


def dispatch(path: Path, rank: int, backend: str) -> tuple[list[str], list[float]]:
    register_engine("recorder", Recorder, devices=["meta"])
    join(path, rank, 2, backend)
    dist.all_reduce(torch.ones(2, device="meta"), dist.ReduceOp.MAX)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return Recorder.seen, tensor.tolist()


@pytest.mark.parametrize(
    "backend",
    [
        "cpu:slow_store,meta:recorder",
        "meta:recorder,cpu:slow_store",
        "cpu:gloo,meta:recorder",  # torch's name stands for gradwire's engine
        "meta:recorder,cpu:gradwire_gloo",
    ],
)
def test_each_tensor_goes_to_the_engine_of_its_device(workers, tmp_path, backend):
    pending = [m.start(dispatch, tmp_path / "met", rank, backend) for rank, m in enumerate(workers(2))]
    assert [each.result() for each in pending] == [(["meta max"], [2.0, 2.0])] * 2
