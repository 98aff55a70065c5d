"""Groups end with their last reference or when they are destroyed, and the other ranks are told."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d import FileStore, PrefixStore
from gradwire.errors import RankLostError
from gradwire.net.event_loop import acquire_event_loop

import tests.c10d.engines.fake_nccl  # noqa: F401 - registers its engine, in workers too
from tests.c10d.members import everywhere
from tests.ports import free_port

BACKENDS = ["gradwire_shm", "gradwire_gloo", "gradwire_mpi", "fake_nccl"]
TOLD_SECONDS = 15.0
"""Seconds in which the others hear that a rank has dropped its group; their operations time out after 60 s."""

here: dict[str, Any] = {}
"""Objects that a worker process keeps between the functions that it runs."""


def open_store(path: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    here.update(store=FileStore(str(path), size), rank=rank, size=size)


def make_group(backend: str, name: str) -> Any:
    """Makes a group that torch's registry does not know."""
    options = SimpleNamespace(
        store=PrefixStore(name, here["store"]),
        group_rank=here["rank"],
        group_size=here["size"],
        timeout=timedelta(seconds=60),
        group_id=name,
        global_ranks_in_group=[],
    )
    return dist.Backend._plugins[backend.upper()].creator_fn(options)


@pytest.fixture
def without_groups(workers, tmp_path):
    """Starts workers that have a store but no groups yet."""

    def start(size: int = 2):
        started = workers(size)
        for each in [worker.start(open_store, tmp_path / "store", i, size) for i, worker in enumerate(started)]:
            each.result()
        return started

    return start


def use(group: Any) -> None:
    """Uses a group so that all of its threads start."""
    group.allreduce([torch.ones(4)]).wait()
    assert group.allreduce([torch.ones(4)]).get_future().wait()[0].tolist() == [2.0] * 4
    if group.rank() == 0:
        group.send([torch.ones(3)], 1, 3).wait()
    else:
        group.recv([torch.ones(3)], 0, 3).wait()


def resources() -> tuple[int, int]:
    """Returns the numbers of threads, C++ threads included, and of open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def remaining(objects: Sequence[weakref.ref[Any]], before: tuple[int, int]) -> list[int]:
    """Returns how many of the objects are alive, and how many more threads and files there are than before.

    Waits for up to 10 s until there is none of them: a thread that has completed an operation refers to it for
    another moment, and the kernel ends threads with a delay.
    """
    deadline = time.monotonic() + 10
    while any(left := [sum(each() is not None for each in objects), *_more_than(before)]):
        if time.monotonic() > deadline:
            break
        threading.Event().wait(0.005)
    return left


def _more_than(before: tuple[int, int]) -> list[int]:
    return [max(now - then, 0) for now, then in zip(resources(), before, strict=True)]


def make_and_drop(backend: str) -> list[int]:
    """Drops ten groups. Returns what remains of them: see `remaining`."""
    if backend == "gradwire_mpi":  # MPI's world stays until the process ends
        first = make_group(backend, "world")
        use(first)
        first.shutdown()
        del first
    gc.collect()
    gc.disable()  # groups must be freed by reference counting
    before = resources()
    groups = [make_group(backend, f"group {number}") for number in range(10)]
    alive = [weakref.ref(group) for group in groups]
    parts = [weakref.ref(part) for group in groups for part in (group._core, group.engine("cpu"))]
    over = [threading.Event() for _ in groups]
    for group, event in zip(groups, over, strict=True):
        use(group)
        group.add_close_callback(event.set)
    assert resources() > before
    here["store"].barrier("used", here["size"])
    del group
    groups.clear()
    assert all(event.wait(60) for event in over)
    return remaining([*alive, *parts], before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_groups_release_everything(without_groups, backend):
    assert everywhere(without_groups(), make_and_drop, backend) == [[0, 0, 0]] * 2


def make_and_destroy(path: Path, rank: int, backend: str) -> list[int]:
    open_store(path, rank, 2)
    gc.collect()
    gc.disable()
    before = resources()
    alive = []
    dist.init_process_group(backend, store=here["store"], rank=rank, world_size=2)
    for _ in range(3):
        group = dist.new_group()
        use(group)
        alive.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
        assert alive[-1]() is None
    for _ in range(3):
        alive.append(weakref.ref(dist.new_group()))
    alive.append(weakref.ref(dist.group.WORLD))
    here["store"].barrier("made", 2)  # a group must not end while the other rank is still connecting it
    dist.destroy_process_group()
    return remaining(alive, before)


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_destroyed_groups_release_everything(workers, tmp_path, backend):
    pending = [w.start(make_and_destroy, tmp_path / "store", i, backend) for i, w in enumerate(workers(2))]
    assert [each.result() for each in pending] == [[0, 0, 0]] * 2


def make_one(backend: str) -> None:
    here["group"] = make_group(backend, "one")
    use(here["group"])


def drop() -> float:
    del here["group"]
    return time.time()


def reduce_until_an_error() -> tuple[str, str, float]:
    """Returns the errors of a collective in flight and of the next one, and how long the first took."""
    with pytest.raises(RankLostError) as first:
        here["group"].allreduce([torch.ones(4)]).wait()
    told = time.time()
    with pytest.raises(RankLostError) as second:
        here["group"].allreduce([torch.ones(4)]).wait()
    assert first.value.rank == 1
    return str(first.value), str(second.value), told


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_ranks_learn_which_rank_dropped_the_group(without_groups, backend):
    first, second = started = without_groups()
    everywhere(started, make_one, backend)
    pending = first.start(reduce_until_an_error)
    dropped = second.run(drop)
    *texts, told = pending.result()
    for text in texts:
        assert "rank 1 is lost: " in text
        assert "dropped the group" in text
    assert told - dropped < TOLD_SECONDS


def reduce_later() -> str:
    here["group"].set_timeout(timedelta(seconds=20))
    with pytest.raises(RankLostError) as raised:
        here["group"].allreduce([torch.ones(4)]).wait()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_rank_0_tells_other_ranks_of_a_departure(without_groups, backend):
    started = without_groups(3)
    everywhere(started, make_unused, backend)
    started[2].run(drop)
    for text in everywhere(started[:2], reduce_later):
        assert "rank 2 is lost: " in text
        assert "dropped the group" in text


def make_unused(backend: str) -> None:
    here["group"] = make_group(backend, "one")


def receive_and_drop() -> bool:
    """Starts a receive and drops the group; returns whether the group is alive."""
    here["received"] = torch.zeros(3)
    here["work"] = here["group"].recv([here["received"]], 1, 7)
    here["alive"] = weakref.ref(here["group"])
    del here["group"]
    return here["alive"]() is not None


def send() -> None:
    here["group"].send([torch.full((3,), 5.0)], 0, 7).wait()


def finish() -> tuple[list[float], bool]:
    here["work"].wait()
    return here["received"].tolist(), here["alive"]() is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_work_keeps_its_group_until_it_is_completed(without_groups, backend):
    first, second = started = without_groups()
    everywhere(started, make_one, backend)
    assert first.run(receive_and_drop)
    second.run(send)
    assert first.run(finish) == ([5.0] * 3, False)


def reduce_now() -> list[float]:
    return here["group"].allreduce([torch.ones(4)]).get_future().wait()[0].tolist()


def start_two_and_drop() -> None:
    here["group"].allreduce([torch.ones(4)])
    if here["rank"] == 0:
        here["group"].send([torch.full((3,), 7.0)], 1, 5)
    del here["group"]


def reduce_and_receive() -> tuple[list[float], list[float]]:
    received = torch.zeros(3)
    here["group"].recv([received], 0, 5).wait()
    return reduce_now(), received.tolist()


@pytest.mark.parametrize("backend", ["gradwire_shm", "gradwire_gloo"])
def test_operations_in_flight_complete_after_their_group_is_dropped(without_groups, backend):
    first, second = started = without_groups()
    everywhere(started, make_one, backend)
    first.run(start_two_and_drop)
    assert second.run(reduce_and_receive) == ([2.0] * 4, [7.0] * 3)


def drop_in_a_reference_cycle() -> None:
    """Has the garbage collector find the group on the event loop's thread, which its finalizer uses."""
    gc.disable()
    cycle: dict[str, Any] = {"group": here.pop("group")}
    cycle["itself"] = cycle
    over = threading.Event()
    cycle["group"].add_close_callback(over.set)
    loop = acquire_event_loop()
    del cycle
    loop.loop.call_soon_threadsafe(gc.collect)
    assert over.wait(60)
    loop.release()


def test_a_group_can_be_garbage_collected_on_any_thread(without_groups):
    started = without_groups()
    everywhere(started, make_one, "gradwire_gloo")
    everywhere(started, drop_in_a_reference_cycle)


def drop_in_a_fork() -> int:
    """Forks a child that drops its copy of the group; the parent's group must go on."""
    child = os.fork()
    if not child:
        here.pop("group")
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_group_dropped_in_a_forked_process_goes_on_in_its_parent(without_groups):
    started = without_groups()
    everywhere(started, make_one, "gradwire_shm")
    assert everywhere(started, drop_in_a_fork) == [0, 0]
    assert everywhere(started, reduce_now) == [[2.0] * 4] * 2


def make_groups_at_one_port() -> int:
    groups = []
    port = free_port()
    for _ in range(2):
        c10d.init_process_group("gloo", f"tcp://localhost:{port}", rank=0, world_size=1)
        groups.append(dist.group.WORLD)
        c10d.destroy_process_group()
    return len(groups)


def test_a_destroyed_group_releases_its_port_while_it_is_referenced(workers):
    assert workers(1)[0].run(make_groups_at_one_port) == 2
