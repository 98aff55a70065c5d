"""The check of calls and monitored_barrier wait in the store, and still notice that a rank will not come."""

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.errors import CollectiveTimeoutError, GroupAbortedError, RankLostError

from tests.c10d.members import everywhere
from tests.ports import free_port
from tests.remote_functions import wait_until
from tests.workers import Worker

GROUP_TIMEOUT_S = 600.0
"""Longer than the tests wait for a result."""


def join(url: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    options = c10d.GroupOptions(check_calls=True)
    c10d.init_process_group("gloo", url, rank=rank, world_size=size, timeout=GROUP_TIMEOUT_S, pg_options=options)


@pytest.fixture
def group(workers, tmp_path):
    """Starts workers in a group that checks calls: `group(2)`, or `group(2, url)`."""

    def start(size: int, url: str = "") -> list[Worker]:
        members = workers(size)
        pending = [
            each.start(join, url or f"file://{tmp_path}/store", rank, size) for rank, each in enumerate(members)
        ]
        for each in pending:
            each.result()
        return members

    return start


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


CALLS = pytest.mark.parametrize("call", [all_reduce, c10d.monitored_barrier], ids=["check", "monitored_barrier"])


def count_keys() -> int:
    return dist.group.WORLD.get_group_store().num_keys()


def wait_for_keys(count: int) -> None:
    """Waits until the store has this many keys: each rank sets one before it waits for the others."""
    wait_until(lambda: count_keys() >= count)


def lose_a_rank(call: Callable[[], None]) -> int:
    with pytest.raises(RankLostError) as caught:
        call()
    return caught.value.rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def abort() -> None:
    dist.group.WORLD.abort()


@CALLS
@pytest.mark.parametrize("end", [die, abort, dist.destroy_process_group], ids=["dies", "aborts", "leaves"])
def test_a_rank_that_ends_is_noticed_by_those_that_wait_for_it(group, call, end):
    first, second, third = group(3)
    before = second.run(count_keys)
    waiting = [each.start(lose_a_rank, call) for each in (first, third)]
    second.run(wait_for_keys, before + 2)
    second.start(end)
    assert [each.result() for each in waiting] == [1, 1]


@CALLS
def test_a_rank_that_dies_with_the_store_is_named(group, call):
    host, other = group(2, f"tcp://127.0.0.1:{free_port()}")
    before = host.run(count_keys)
    waiting = other.start(lose_a_rank, call)
    host.run(wait_for_keys, before + 1)
    host.kill()
    assert waiting.result() == 0


def abort_while_waiting(call: Callable[[], None]) -> None:
    """Aborts the group on one thread, while another one waits. The group then makes no engine any more."""
    before = count_keys()

    def abort_later() -> None:
        wait_for_keys(before + 1)
        abort()

    aborting = threading.Thread(target=abort_later)
    aborting.start()
    for each in (call, lambda: dist.group.WORLD.engine("cpu")):
        with pytest.raises(GroupAbortedError):
            each()
        aborting.join()


@CALLS
def test_abort_ends_the_wait(group, call):
    group(2)[0].run(abort_while_waiting, call)


def time_out() -> None:
    with pytest.raises(CollectiveTimeoutError):
        c10d.monitored_barrier(timeout=timedelta(0))


def pass_barriers(count: int) -> None:
    for _ in range(count):
        c10d.monitored_barrier()


def test_barriers_leave_no_keys(group):
    members = group(3)
    counts = []
    for times in (2, 10):
        everywhere(members, pass_barriers, times)
        counts.append(members[0].run(count_keys))
    assert counts[1] == counts[0]
    assert members[0].run(time_out) is None
    everywhere(members[1:], pass_barriers, 1)  # they find the key of the rank that has given up
    everywhere(members, pass_barriers, 2)
    assert members[0].run(count_keys) == counts[0]
