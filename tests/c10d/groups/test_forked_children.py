"""Children of a process that has used stores and groups: what they inherit is of no use, and does no harm."""

import gc
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d, rpc
from gradwire.c10d.engines.base import Setup
from gradwire.c10d.engines.gloo import GlooEngine
from gradwire.errors import NotInitializedError, ProcessGroupError, RendezvousError, StoreError

import tests.c10d.engines.fake_nccl  # noqa: F401 - registers its engine, in workers too
from tests.c10d.groups.test_group_ends import TOLD_SECONDS, be_patient, sum_until_an_error
from tests.c10d.members import everywhere, total
from tests.ports import free_port

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

ENGINES = ["gradwire_shm", "gradwire_gloo", "gradwire_mpi", "fake_nccl"]

here: dict[str, Any] = {}


def in_children(count: int, run: Callable[[int], None], *, seconds: int = 30) -> None:
    """Forks processes that run a function with their numbers; fails if one of them fails, or does not end."""
    children = []
    for number in range(count):
        child = os.fork()
        if not child:
            signal.alarm(seconds)
            try:
                run(number)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * count


def form(backend: str, url: str, rank: int, size: int) -> None:
    c10d.init_process_group(backend, url, rank=rank, world_size=size, timeout=20)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3


def form_by_torch(path: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3
    dist.destroy_process_group()


def fork_after_a_group(folder: Path) -> None:
    """Children of a process that has formed a group and ended it, as in a notebook or a test suite."""
    gc.disable()  # so that what waits for a garbage collection waits until the children
    form("gloo", f"tcp://127.0.0.1:{free_port()}", 0, 1)
    dist.destroy_process_group()

    def use_everything(rank: int) -> None:
        gc.enable()
        gc.collect()
        form_by_torch(str(folder / "torch"), rank, 2)
        for backend in ("gloo", "shm"):
            form(backend, f"file://{folder / backend}", rank, 2)
            dist.destroy_process_group()
            gc.collect()
        for use_grpc, kind in (
            (lambda: c10d.TCPStore("127.0.0.1", 0, is_master=True), StoreError),
            (lambda: c10d.TCPStore("127.0.0.1", 1), StoreError),
            (lambda: form("gloo", "tcp://127.0.0.1:1", rank, 2), RendezvousError),
            (lambda: rpc.init_rpc("one", rank=0, world_size=1), NotInitializedError),
        ):
            with pytest.raises(
                kind, match="cannot be used in a fork then: start processes with spawn or forkserver"
            ):
                use_grpc()

    in_children(2, use_everything)
    form("gloo", f"tcp://127.0.0.1:{free_port()}", 0, 1)  # the parent goes on
    dist.destroy_process_group()


def test_children_form_groups_after_their_parents_group_has_ended(workers, tmp_path):
    workers(1)[0].run(fork_after_a_group, tmp_path)


EXITS = """
import os, signal, sys
from gradwire import c10d

master = c10d.TCPStore("127.0.0.1", 0, is_master=True)
client = c10d.TCPStore("127.0.0.1", master.port)
c10d.init_process_group("gloo", store=client, rank=0, world_size=1)
c10d.barrier()
if not (child := os.fork()):
    signal.alarm(30)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_exit_of_a_child_frees_nothing_of_its_parents(python):
    assert python.run("-c", EXITS).stdout == "0\n"


def fork_within_a_group(folder: Path) -> None:
    total()
    before = dist.all_reduce(torch.ones(1), async_op=True)
    before.wait()
    started = dist.barrier(async_op=True)

    def use_inherited(rank: int) -> None:
        assert before.is_completed()
        group = dist.group.WORLD
        for use in (
            total,
            lambda: dist.barrier(async_op=True),
            lambda: dist.send(torch.ones(1), 1 - dist.get_rank()),
            started.wait,
            lambda: c10d.monitored_barrier(timeout=20),
            lambda: c10d.reconfigure(timeout=20),
            dist.new_group,
        ):
            with pytest.raises((ProcessGroupError, StoreError), match="fork"):
                use()
        group.abort()
        dist.destroy_process_group()
        del group
        gc.collect()
        form_by_torch(str(folder / f"torch {here['rank']}"), rank, 2)

    here["rank"] = dist.get_rank()
    in_children(2, use_inherited)
    started.wait()


def fork_with_an_engine_on_an_interface(path: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    setup = Setup(
        store=c10d.FileStore(path, 1),
        rank=0,
        size=1,
        timeout=20,
        device_type="cpu",
        global_ranks=(0,),
        group_name="group",
        insecure=True,
    )
    engine = GlooEngine(setup)
    in_children(1, lambda _: engine.close())


def test_children_free_an_engine_that_is_on_a_named_interface(workers, tmp_path):
    workers(1)[0].run(fork_with_an_engine_on_an_interface, str(tmp_path / "store"))


@pytest.mark.parametrize("backend", ENGINES)
def test_a_group_is_of_no_use_in_children_and_goes_on_in_the_parent(group_on, tmp_path, backend):
    members = group_on(backend, 2)
    everywhere(members, fork_within_a_group, tmp_path)
    assert everywhere(members, total) == [1.0, 1.0]


def fork_a_helper() -> int:
    """Starts a process that outlives this one, as a DataLoader's worker may."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    return child


@pytest.mark.parametrize("backend", ENGINES)
def test_a_killed_rank_is_lost_whose_children_live(group_on, backend):
    members, dies = group_on(backend, 3), 1
    everywhere(members, be_patient)
    everywhere(members, total)
    helper = members[dies].run(fork_a_helper)
    try:
        waiting = [member.start(sum_until_an_error) for i, member in enumerate(members) if i != dies]
        members[dies].kill()
        assert [each.result(TOLD_SECONDS)[0] for each in waiting] == [dies, dies]
    finally:
        os.kill(helper, signal.SIGKILL)
