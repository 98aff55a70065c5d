"""Tensors that engines cannot use as they are: they are staged, or refused before anything is sent."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gradwire.c10d.engines.staging import Staging
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.c10d.members import everywhere


@pytest.fixture(params=["gradwire_shm", "gradwire_gloo", "gradwire_mpi"])
def members(request, group_on):
    """Two workers in a group, on one engine after another."""
    return group_on(request.param, 2)


def reduce_inference_tensors() -> tuple[float, list[float]]:
    """Reduces inference tensors asynchronously, on other threads; one is strided, one needs a wider dtype."""
    with torch.inference_mode():
        strided = torch.ones(4, 4)[:, ::2]
        narrow = torch.ones(3, dtype=torch.bfloat16)
        works = [
            dist.all_reduce(strided, async_op=True),
            dist.all_reduce(narrow, dist.ReduceOp.AVG, async_op=True),
        ]
    for work in works:
        work.wait()
    return strided.sum().item(), narrow.tolist()


def send_tensors_of_one_element() -> list[float]:
    """Sends tensors of one element, which are contiguous with any stride."""
    rank = dist.get_rank()
    expanded, strided = torch.tensor(float(rank)).expand(1), torch.arange(4.0)[rank::2][:1]
    gathered = [torch.zeros(1), torch.zeros(4)[::2][:1]]
    dist.all_gather(gathered, expanded)
    received = torch.zeros(2)
    dist.all_to_all(list(received.chunk(2)), [expanded, strided])
    return [*torch.cat(gathered).tolist(), *received.tolist()]


def reduce_a_pending_result() -> list[float]:
    """Reduces the result of a functional collective that has not been waited for."""
    tensor = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert isinstance(tensor, functional.AsyncCollectiveTensor)
    dist.all_reduce(tensor)
    return tensor.tolist()


def refuse() -> float:
    """Gives tensors without memory, which are refused; the group stays usable."""
    mesh = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        fake = torch.ones(2)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    for tensor in (DTensor.from_local(torch.ones(2), mesh, [Shard(0)]), fake, freed):
        with pytest.raises(TypeError, match="no memory of its own"):
            dist.all_reduce(tensor)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(3))
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_odd_tensors(members):
    assert everywhere(members, reduce_inference_tensors) == [(16.0, [1.0] * 3)] * 2
    assert everywhere(members, send_tensors_of_one_element) == [[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]]
    assert everywhere(members, reduce_a_pending_result) == [[4.0, 4.0]] * 2
    assert everywhere(members, refuse) == [2.0] * 2


def test_inference_tensors_keep_what_is_lazy():
    with torch.inference_mode():
        numbers = torch.tensor([1 + 2j])
        lazy = [numbers.conj(), numbers.conj().imag]
        assert lazy[0].is_conj()
        assert lazy[1].is_neg()
    assert [Staging().input(each).tolist() for each in lazy] == [[1 - 2j], [-2.0]]


def test_plain_tensors_are_not_copied():
    tensor, staging = torch.ones(2, 3, requires_grad=True), Staging()
    assert staging.input(tensor).data_ptr() == staging.output(tensor).data_ptr() == tensor.data_ptr()
    assert not staging.needs_copy_back()
