"""The interface of groups that torch's functions, C++ and registry of backends use."""

import subprocess
import sys
from datetime import timedelta
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d.groups.backends import register_backends
from gradwire.c10d.groups.collectives import Collectives
from gradwire.c10d.groups.process_group import OPERATIONS
from gradwire.errors import UnsupportedOperationError
from gradwire.torch_internals import HAS_PYTHON_BACKENDS, TorchBackend, backend_names

from tests.c10d.members import everywhere

from_2_14 = pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="torch has no interface for backends before 2.14")

GROUP = "torch.distributed.backends"
NAMES = ["gradwire", "gradwire_gloo", "gradwire_mpi", "gradwire_nccl", "gradwire_shm"]


def test_every_engine_has_an_entry_point():
    # By name: an editable install may be on the path twice.
    points = {point.name: point for point in entry_points(group=GROUP) if point.value.startswith("gradwire.")}
    assert sorted(points) == NAMES
    assert {point.load() for point in points.values()} == {register_backends}
    register_backends()  # a second time, as when torch loads the entry point after an import of gradwire
    assert set(NAMES) <= set(backend_names())


WITHOUT_IMPORT = """
import sys
import torch
import torch.distributed as dist

assert dist.is_backend_available(sys.argv[2].rpartition(":")[2])
dist.init_process_group(sys.argv[2], init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(type(dist.group.WORLD).__module__, dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


@from_2_14
@pytest.mark.parametrize("backend", ["gradwire_shm", "cpu:gradwire_gloo"])
def test_torch_finds_an_engine_without_an_import(tmp_path, backend):
    command = [sys.executable, "-W", "error", "-c", WITHOUT_IMPORT, str(tmp_path / "met"), backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split() == ["gradwire.c10d.groups.process_group", backend, "[1.0,", "1.0]"], done.stderr


def operate_from_below() -> tuple[list[float], str]:
    """As C++ starts operations: through the dispatcher, and the backend of the group."""
    world = dist.group.WORLD
    tensor = torch.full((2,), float(dist.get_rank()))
    asynchronous = True
    torch.ops.c10d.broadcast_([tensor], world.boxed(), 1, 0, asynchronous, -1)[1].wait()
    with pytest.raises(ValueError, match="root is 3, but the group has the ranks 0 to 2"):
        torch.ops.c10d.broadcast_([tensor], world.boxed(), 3, 0, asynchronous, -1)
    return tensor.tolist(), type(dist.get_backend_impl()).__name__


@from_2_14
def test_operations_that_cpp_starts_reach_the_group(group):
    assert everywhere(group(3), operate_from_below) == [([1.0, 1.0], "GroupBackend")] * 3


def test_a_backend_forwards_every_operation_that_cpp_calls():
    defined = set(vars(Collectives))
    both = {name for name in defined if hasattr(TorchBackend, name) and name[0] != "_"}
    assert both - {"alltoall_base"} <= set(OPERATIONS)
    assert set(OPERATIONS) <= defined


def form_by_torch(url: str, backend: str, rank: int) -> None:
    """Forms a group by torch's own functions: of both ranks, then of this rank alone."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=2, enable_reconfigure=True)
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (-1, -1)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle/{rank}", dist._get_reconfigure_handle())
    dist._reconfigure(1, [store.get(f"handle/{each}").decode() for each in range(2)]).wait()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    backend_of_cpu = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend_of_cpu.supports_reconfigure
    assert (backend_of_cpu.rank(), backend_of_cpu.size()) == (rank, 2)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3
    dist._reconfigure(2 + rank, [dist._get_reconfigure_handle()]).wait()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


@from_2_14
@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_groups_form_anew_by_torch(workers, tmp_path, backend):
    url = f"file://{tmp_path / 'met'}"
    for each in [w.start(form_by_torch, url, backend, rank) for rank, w in enumerate(workers(2))]:
        each.result()


def ask_for_reconfigure(url: str) -> None:
    dist.init_process_group("gradwire_mpi", init_method=url, rank=0, world_size=1, enable_reconfigure=True)


@from_2_14
def test_enable_reconfigure_is_refused_on_mpi(workers, tmp_path):
    with pytest.raises(UnsupportedOperationError, match="cannot form groups anew: a process stays in"):
        workers(1)[0].run(ask_for_reconfigure, f"file://{tmp_path / 'met'}")


def describe_backend() -> dict[str, object]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    told = {name: getattr(backend, name) for name in dir(TorchBackend) if "supports_" in name}
    told["options"] = (backend.options.backend, backend.options._timeout)
    told["name"] = backend.name()
    return {name: value for name, value in told.items() if isinstance(value, bool | str | tuple) and value}


@from_2_14
def test_a_backend_tells_what_it_supports(group):
    options = ("gradwire_shm", timedelta(seconds=300))
    told = {"supports_splitting": True, "supports_reconfigure": True, "options": options, "name": "gradwire_shm"}
    assert group(3)[0].run(describe_backend) == told


def gather_into_one() -> list[float]:
    """Gathers into a root tensor that is not contiguous."""
    options = dist.GatherOptions()
    options.rootRank = 2
    rank = dist.get_rank()
    output = torch.zeros(6, 2)[:, 0] if rank == 2 else torch.empty(0)
    dist.group.WORLD.gather_single(output, torch.tensor([rank, rank + 10.0]), options).wait()
    return output.tolist()


WHOLE = [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]


def test_tensors_are_gathered_into_one(group):
    assert everywhere(group(3), gather_into_one) == [[], [], WHOLE]


def gather_into_one_by_torch() -> list[list[float]] | None:
    rank = dist.get_rank()
    output = torch.zeros(3, 2) if rank == 1 else None
    dist.gather_single(torch.tensor([rank, rank + 10.0]), output, dst=1)
    return None if output is None else output.flatten().tolist()


@from_2_14
def test_torchs_own_function_gathers_into_one(group):
    assert everywhere(group(3), gather_into_one_by_torch) == [None, WHOLE, None]


def gather_into_too_little() -> None:
    dist.group.WORLD.gather_single(torch.zeros(5), torch.zeros(2))


def test_one_tensor_must_hold_all(group):
    with pytest.raises(ValueError, match="must have 3 times the elements of the input, but they have 5 and 2"):
        group(3)[0].run(gather_into_too_little)
