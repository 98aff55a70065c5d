"""Making groups through gradwire: rendezvous, names, subgroups."""

import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from gradwire import c10d
from gradwire.c10d.groups.api import full_names
from gradwire.c10d.stores import base
from gradwire.errors import RendezvousError
from gradwire.torch_internals import HAS_PYTHON_BACKENDS, TorchBackend


def test_c10d_has_the_names_of_torch_distributed():
    assert c10d.all_reduce is torch.distributed.all_reduce
    assert c10d.ReduceOp is torch.distributed.ReduceOp
    assert c10d.Store is not torch.distributed.Store
    assert {"all_gather", "init_process_group", "TCPStore"} <= set(dir(c10d))
    with pytest.raises(AttributeError, match=r"neither gradwire.c10d nor torch.distributed has 'al_reduce'"):
        c10d.al_reduce  # noqa: B018


@pytest.mark.parametrize(
    ("short", "full"),
    [
        (None, "gradwire"),
        ("shm", "gradwire_shm"),
        ("gradwire_shm", "gradwire_shm"),
        ("cpu:gloo,cuda:nccl", "cpu:gradwire_gloo,cuda:gradwire_nccl"),
        ("cpu:mpi,cuda:dummy", "cpu:gradwire_mpi,cuda:dummy"),
    ],
)
def test_short_names(short, full):
    assert full_names(short) == full


@pytest.mark.parametrize("backend", ["smh", "cpu:smh,cuda:nccl"])
def test_an_unknown_backend_is_refused_before_anybody_is_waited_for(backend, tmp_path):
    url = f"file://{tmp_path / 'store'}?rank=0&world_size=2"
    with pytest.raises(ValueError, match="there is no backend 'smh': give .*'shm'"):
        c10d.init_process_group(backend, url)
    assert not list(tmp_path.iterdir())


def join(path: Path, rank: int, size: int) -> None:
    import tests.c10d.store_engine

    assert tests.c10d.store_engine
    c10d.init_process_group("slow_store", f"file://{path}", rank=rank, world_size=size, timeout=30)


@pytest.fixture
def three(workers, tmp_path):
    members = workers(3)
    for pending in [member.start(join, tmp_path / "met", rank, 3) for rank, member in enumerate(members)]:
        pending.result()
    return members


def split() -> list[float] | None:
    group = c10d.split_group(split_ranks=[[2, 0]], timeout=10, group_desc="the even ones")
    if group is None:
        return None
    tensor = torch.tensor([float(c10d.get_rank()), 1.0])
    c10d.all_reduce(tensor, group=group)
    assert group.group_desc == "the even ones"
    return tensor.tolist()


def test_a_group_is_split(workers, three):
    assert workers.each(three, split) == [[2.0, 2.0], None, [2.0, 2.0]]


def split_as_torch_does() -> list[float] | None:
    """Splits a group as on a machine with an accelerator, where torch asks the parent's backend."""
    world = torch.distributed.group.WORLD
    world.eager_connect_single_device(torch.device("cuda", 0))  # what init_process_group(device_id=...) calls
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")),
    ):
        group = torch.distributed.split_group(split_ranks=[[2, 0], [1]], group_desc="a part")
    assert (group.bound_device_id, group.group_desc) == (torch.device("cuda", 0), "a part")
    assert group.options == world.options
    tensor = torch.tensor([float(c10d.get_rank()), 1.0])
    c10d.all_reduce(tensor, group=group)
    # In the order given from torch 2.14 on, and sorted before.
    assert sorted(c10d.get_process_group_ranks(group)) == ([0, 2] if group.size() == 2 else [1])
    c10d.destroy_process_group(group)
    return tensor.tolist()


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 splits groups for CUDA only")
def test_torchs_own_function_splits_a_group(workers, three):
    assert workers.each(three, split_as_torch_does) == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]


def make_groups_on_a_device() -> list[float | None]:
    """Makes groups as on ranks with a `device_id`, where torch splits new groups from the default group."""
    torch.distributed.group.WORLD.eager_connect_single_device(torch.device("cuda", 0))
    found = []
    for ranks in ([0, 2], [1]):
        group = torch.distributed.new_group(ranks)
        tensor = torch.ones(1)
        if c10d.get_rank() in ranks:
            c10d.all_reduce(tensor, group=group)
        found.append(tensor.item())
    return found


def test_groups_are_made_on_a_device(workers, group_on):
    members = group_on("gradwire", 3)
    assert workers.each(members, make_groups_on_a_device) == [[2.0, 1.0], [1.0, 1.0], [2.0, 1.0]]


def describe_backends() -> None:
    world = torch.distributed.group.WORLD
    assert world._device_types == [torch.device("cpu")]
    backend = world._get_backend(torch.device("cpu"))
    assert isinstance(backend, TorchBackend) if HAS_PYTHON_BACKENDS else backend is world
    with pytest.raises(RuntimeError, match="no backend for cuda, only for cpu"):
        world._get_backend(torch.device("cuda"))
    assert backend.supports_splitting
    assert not backend.supports_coalescing
    assert (backend.rank(), backend.size()) == (0, 3)


def test_a_group_is_its_own_backend(three):
    three[0].run(describe_backends)


def divide() -> list[float]:
    groups = [c10d.new_group([rank], timeout=5.5, backend="slow_store") for rank in range(3)]
    tensor = torch.ones(1)
    c10d.all_reduce(tensor, group=groups[c10d.get_rank()])
    c10d.all_reduce(tensor)
    c10d.destroy_process_group()
    return tensor.tolist()


def test_new_groups_take_seconds(workers, three):
    assert workers.each(three, divide) == [[3.0]] * 3


def make_and_destroy(path: Path, rank: int, backend: str) -> list[float]:
    """Makes the default group repeatedly in one store, which keeps what earlier groups wrote."""
    found = []
    with c10d.FileStore(str(path)) as store:
        for time in range(4):
            if rank == 0:
                store.wait([f"{time}"])  # so that rank 1 reads the store first
            else:
                store.set(f"{time}", "")
            c10d.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=30)
            tensor = torch.tensor([float(rank)])
            c10d.all_reduce(tensor)
            found.append(tensor.item())
            c10d.destroy_process_group()
        return found


@pytest.mark.parametrize("backend", ["shm", "gloo", "mpi"])
def test_the_default_group_is_made_again_in_one_store(workers, tmp_path, backend):
    pending = [each.start(make_and_destroy, tmp_path / "met", i, backend) for i, each in enumerate(workers(2))]
    assert [each.result() for each in pending] == [[1.0] * 4] * 2


def open_stores_after_groups() -> int:
    """Returns how many more stores are open after groups were made and destroyed."""
    before = len(base._open_stores)
    for _ in range(3):
        c10d.destroy_process_group(c10d.new_group())
    gc.collect()
    return len(base._open_stores) - before


def test_a_destroyed_group_closes_its_stores(workers, three):
    assert [each.result() for each in [member.start(open_stores_after_groups) for member in three]] == [0] * 3


def refuse() -> None:
    with pytest.raises(ValueError, match="split_ranks is empty"):
        c10d.split_group(split_ranks=[])
    with pytest.raises(ValueError, match=r"0 to 2, once at most"):
        c10d.split_group(split_ranks=[[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"0 to 2, once at most"):
        c10d.split_group(split_ranks=[[3]])
    with pytest.raises(TypeError, match=r"pg_options is \[\'shm\'\]: give gradwire.c10d.GroupOptions"):
        c10d.split_group(split_ranks=[[0]], pg_options=["shm"])


def test_bad_splits_are_refused(three):
    three[0].run(refuse)


def test_split_group_needs_a_default_group():
    with pytest.raises(ValueError, match="call init_process_group first"):
        c10d.split_group(split_ranks=[[0]])


def test_bad_rendezvous_arguments_are_refused():
    with pytest.raises(RendezvousError, match="world_size"):
        c10d.init_process_group("shm", "file:///tmp/nowhere", rank=0)
    with pytest.raises(TypeError, match="timedelta or seconds"):
        c10d.init_process_group("shm", "file:///tmp/nowhere", timeout="long", rank=0, world_size=1)
