"""Groups that are formed anew in the same processes: without lost ranks, and with newcomers."""

import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import c10d
from gradwire.c10d import GroupOptions, HashStore, TCPStore
from gradwire.c10d.groups.member import Arrival, GroupHandle, ReconfigureRound
from gradwire.errors import GroupAbortedError, ProcessGroupError, RankLostError, UnsupportedOperationError
from gradwire.view.snapshot import process_groups

import tests.c10d.engines.fake_nccl  # noqa: F401 - registers its engine, in workers too
from tests.c10d.groups.test_group_lifetime import resources
from tests.c10d.members import everywhere, total
from tests.remote_functions import wait_until
from tests.workers import Worker

BACKENDS = ["gradwire_shm", "gradwire_gloo", "fake_nccl"]
JOIN_TIMEOUT = timedelta(seconds=60)

opened: dict[str, Any] = {}
"""What a worker process keeps between the functions that it runs."""


@pytest.fixture
def port():
    """Hosts a store in the process of the test, which outlives all ranks. Returns its port."""
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        yield store.port


def join(port: int, backend: str, rank: int, size: int) -> None:
    """Makes the default group; without ranks if the size is 0."""
    torch.set_num_threads(1)
    opened["store"] = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        backend,
        store=opened["store"],
        rank=rank,
        world_size=max(size, 1),
        timeout=JOIN_TIMEOUT,
        pg_options=GroupOptions(enable_reconfigure=size == 0),
    )


@pytest.fixture
def members(workers, port):
    """Starts workers in one group, or each in one without ranks: `members(3, backend, has_ranks=False)`."""

    def start(count: int, backend: str, *, has_ranks: bool = True) -> list[Worker]:
        started = workers(count)
        size = count if has_ranks else 0
        for each in [
            worker.start(join, port, backend, rank if has_ranks else 0, size)
            for rank, worker in enumerate(started)
        ]:
            each.result()
        return started

    return start


def form(min_size: int | None = None, window: float = 10.0, timeout: float = 30.0) -> tuple[int, int, float]:
    """Forms the default group anew. Returns the rank, the size, and the sum of the ranks."""
    c10d.reconfigure(min_size=min_size, window=window, timeout=timeout).wait()
    return dist.get_rank(), dist.get_world_size(), total()


def ranks_and_sums(size: int) -> list[tuple[int, int, float]]:
    return [(rank, size, size * (size - 1) / 2) for rank in range(size)]


def reduce_until_lost() -> int:
    """Waits in a collective for a rank that dies. Returns which rank was lost."""
    with pytest.raises(RankLostError) as caught:
        dist.all_reduce(torch.ones(4))
    return caught.value.rank


def kill(dying: Sequence[Worker], others: Sequence[Worker]) -> list[int]:
    """Kills workers while the others wait for them. Returns which rank each of the others has lost first."""
    pending = [each.start(reduce_until_lost) for each in others]
    for each in dying:
        os.kill(each.pid, signal.SIGKILL)
    return [each.result() for each in pending]


@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_form_the_group_anew(members, backend):
    first, second, third, fourth = members(4, backend)
    assert kill([second], [first, third, fourth]) == [1, 1, 1]
    assert everywhere([first, third, fourth], form) == ranks_and_sums(3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_shrinks_and_grows_again_and_again(members, backend):
    ranks = members(3, backend)
    for lost in (2, 0):  # rank 0 too, to which the failure detectors connect
        dying = ranks.pop(lost)
        assert kill([dying], ranks) == [lost] * 2
        assert everywhere(ranks, form) == ranks_and_sums(2)
        ranks += members(1, backend, has_ranks=False)
        assert everywhere(ranks, form, 3) == ranks_and_sums(3)
    # The new group's failure detector watches the newcomer.
    assert kill([ranks[2]], ranks[:2]) == [2, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_deaths_at_once(members, backend):
    ranks = members(4, backend)
    kill([ranks[1], ranks[0]], ranks[2:])
    # With rank 0 the failure detector of the old ranks may be gone before it has told of rank 1.
    assert everywhere(ranks[2:], form, 2, 1.0) == ranks_and_sums(2)


def agree_and_die() -> None:
    """Takes part in the agreement, and dies before the group forms."""
    c10d.rendezvous_reconfigure(timeout=30)
    os.kill(os.getpid(), signal.SIGKILL)


def fail_to_form(timeout: float) -> tuple[int, int, str]:
    before = dist.get_rank(), dist.get_world_size()
    with pytest.raises(ProcessGroupError, match="could not form the group anew") as caught:
        c10d.reconfigure(min_size=3, timeout=timeout)
    with pytest.raises((RankLostError, GroupAbortedError)):  # it has no ranks until the next attempt
        dist.all_reduce(torch.ones(1))
    return *before, str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_death_while_the_group_forms(members, backend):
    ranks = members(4, backend)
    assert kill([ranks.pop()], ranks) == [3] * 3
    pending = [each.start(fail_to_form, 5.0) for each in ranks[:2]]
    ranks[2].start(agree_and_die)
    for rank, each in enumerate(pending):
        *before, text = each.result()
        assert before == [rank, 4]
        assert "rank 2 of 3 did not join within 5 s" in text
    assert everywhere(ranks[:2], form, 2, 1.0) == ranks_and_sums(2)


def fail_to_agree() -> str:
    with pytest.raises(ProcessGroupError) as caught:
        c10d.reconfigure(min_size=3, timeout=0.2)
    return str(caught.value)


def shown_sizes() -> list[int]:
    return [each["size"] for each in process_groups()]


def test_the_view_shows_a_group_once_it_has_ranks(members):
    """Before that, its rank and size are -1."""
    pair = members(2, "gradwire_shm", has_ranks=False)
    assert everywhere(pair, shown_sizes) == [[], []]
    everywhere(pair, form, 2, 1.0)
    assert everywhere(pair, shown_sizes) == [[2], [2]]


def test_too_few_members(members):
    ranks = members(2, "gradwire_shm")
    for text in everywhere(ranks, fail_to_agree):
        assert "members arrived within 0.2 s at " in text
        assert "to form the group anew, which needs 3" in text
    assert everywhere(ranks, form) == ranks_and_sums(2)  # the withdrawn arrivals do not count


def be_interrupted() -> None:
    """Stops waiting for others, by Ctrl-C, and then finds that nobody has arrived but this process."""
    with pytest.raises(KeyboardInterrupt):
        c10d.rendezvous_reconfigure(min_size=2)
    with pytest.raises(ProcessGroupError, match="only 1 members arrived"):
        c10d.rendezvous_reconfigure(min_size=2, timeout=0.2)


def wait_for_an_arrival() -> None:
    wait_until(lambda: any(key.endswith("/arrival/0") for key in opened["store"].list_keys()))


def test_an_interrupted_member_is_not_counted_twice(members):
    interrupted, other = ranks = members(2, "gradwire_shm", has_ranks=False)
    pending = interrupted.start(be_interrupted)
    other.run(wait_for_an_arrival)
    os.kill(interrupted.pid, signal.SIGINT)
    pending.result()
    assert sorted(everywhere(ranks, form, 2, 1.0)) == ranks_and_sums(2)


def arrive(store: HashStore, rank: int, size: int = 2) -> list[int]:
    """Takes part in a round as a rank of the last group. Returns which ranks form the next one."""
    arrival = Arrival(
        handle=GroupHandle(member=f"member {rank}", rank=rank, global_rank=-1), generation="last", size=size
    )
    rounds = ReconfigureRound(store, arrival, min_size=2, max_size=None, window_s=60)
    return [GroupHandle.from_text(each).rank for each in rounds.run(30)[1]]


def test_a_member_that_is_killed_while_it_arrives_does_not_hide_later_ones():
    with HashStore() as store, ThreadPoolExecutor(2) as threads:
        store.add("0/arrivals", 1)  # it was killed before it could set its arrival
        assert list(threads.map(arrive, [store] * 2, range(2))) == [[0, 1]] * 2


def test_a_member_counts_once_although_it_could_not_withdraw():
    """As after an error of the store, when the member calls again."""
    with HashStore() as store, ThreadPoolExecutor(3) as threads:
        twice = [threads.submit(arrive, store, 0) for _ in range(2)]
        wait_until(lambda: store.check(["0/arrival/0", "0/arrival/1"]))
        assert arrive(store, 1) == [0, 1]
        assert [each.result() for each in twice] == [[0, 1]] * 2


def wait_in_collective() -> str:
    with pytest.raises(RankLostError) as caught:
        dist.all_reduce(torch.ones(4))
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_that_still_wait_in_a_collective_are_told(members, backend):
    first, second = ranks = members(2, backend)
    waiting = first.start(wait_in_collective)
    formed = second.start(form)
    assert "rank 1 is lost: " in waiting.result()
    assert (first.run(form), formed.result()) == tuple(ranks_and_sums(2))
    assert everywhere(ranks, total) == [1.0, 1.0]


def form_often(times: int) -> None:
    """Forms the group anew many times. Threads and files are no more in the end than after the first time."""
    for number in range(times):
        c10d.reconfigure().wait()
        total()
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        if number == 0:
            most = [count + 2 for count in resources()]
    wait_until(lambda: all(now <= then for now, then in zip(resources(), most, strict=True)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_old_ranks_release_everything(members, backend):
    everywhere(members(2, backend), form_often, 8)


def join_by_handles(count: int) -> None:
    """Does what torch's functions ask for: exchanges handles, and gives them with a number."""
    store = opened["store"]
    index = store.add("count", 1) - 1
    store.set(f"handle/{index}", c10d.get_reconfigure_handle())
    handles = [store.get(f"handle/{index}").decode() for index in range(count)]
    c10d.reconfigure(7, handles).wait()
    with pytest.raises(ProcessGroupError, match="uuid 7 was already used"):
        c10d.reconfigure(7, handles)
    assert dist.get_rank() == index
    assert total() == count * (count - 1) / 2
    c10d.reconfigure(8 + index, {c10d.get_reconfigure_handle()}).wait()
    assert (dist.get_rank(), dist.get_world_size(), total()) == (0, 1, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_caller_may_choose_the_members(members, backend):
    ranks = members(2, backend, has_ranks=False)
    assert everywhere(ranks, c10d.supports_reconfigure) == [True, True]
    assert everywhere(ranks, lambda: (dist.get_rank(), dist.get_world_size())) == [(-1, -1)] * 2
    everywhere(ranks, join_by_handles, 2)


def refuse_on_mpi() -> None:
    assert not c10d.supports_reconfigure()
    for arguments in [(), (1, [c10d.get_reconfigure_handle()])]:
        with pytest.raises(UnsupportedOperationError, match="cannot form groups anew: a process stays in the MPI"):
            c10d.reconfigure(*arguments)
    assert total() == 1.0  # it has not left its ranks


def test_mpi_says_that_it_cannot(members):
    everywhere(members(2, "gradwire_mpi"), refuse_on_mpi)
    with pytest.raises(UnsupportedOperationError, match="restart all processes, or use gradwire_gloo"):
        members(1, "gradwire_mpi", has_ranks=False)


def misuse() -> None:
    handle = c10d.get_reconfigure_handle()
    with pytest.raises(ValueError, match="only one of uuid and handles is given"):
        c10d.reconfigure(1)
    with pytest.raises(ValueError, match="leave them out, gradwire's engines have none"):
        c10d.reconfigure(1, [handle], hints={"fast": "yes"})
    with pytest.raises(ValueError, match="leave them out, gradwire's engines have none"):
        c10d.reconfigure(hints={"fast": "yes"})
    for number, (handles, problem) in enumerate(
        [
            ([], "give a list or set of the handles of all members"),
            ([handle, handle], "name one member twice"),
            (["no handle"], "'no handle' is no handle of a gradwire group"),
            ([handle.replace('": "', '": "0')], "lack that of this process"),
        ]
    ):
        with pytest.raises(ValueError, match=problem):
            c10d.reconfigure(1 + number, handles)  # the refused hints have not used the number 1
    with pytest.raises(ValueError, match="min_size is 3 and max_size 2"):
        c10d.reconfigure(min_size=3, max_size=2)
    with pytest.raises(ValueError, match="min_size is 0"):
        c10d.reconfigure(min_size=0)
    assert total() == 1.0  # nothing has ended the group


def test_wrong_arguments(members):
    everywhere(members(2, "gradwire_shm"), misuse)


def form_parts() -> tuple[int, float]:
    """Splits the group. Returns what a rank of the default group is called in the part, and a sum there."""
    part = dist.group.WORLD.split_group([0, 2], group_name="part")
    if part is None:
        return -1, 0.0
    tensor = torch.tensor([float(dist.get_rank())])
    part.allreduce([tensor]).wait()
    part.shutdown()
    return part.global_ranks[part.rank()], tensor.item()


def test_parts_of_a_group_that_has_formed_anew(members):
    ranks = members(3, "gradwire_shm")
    expected = [(0, 2.0), (-1, 0.0), (2, 2.0)]
    assert everywhere(ranks, form_parts) == expected
    kill([ranks.pop(0)], ranks)
    everywhere(ranks, form)
    ranks += members(1, "gradwire_shm", has_ranks=False)
    everywhere(ranks, form, 3)
    assert everywhere(ranks, form_parts) == expected


def make_subgroup() -> None:
    """Makes a subgroup of the ranks that survive."""
    opened["subgroup"] = dist.new_group([0, 2])


def form_subgroup() -> tuple[int, int, list[int]]:
    """Forms the subgroup anew, after the default group. Returns rank, size and the ranks in the default group."""
    group = opened["subgroup"]
    c10d.reconfigure(group=group, timeout=30)
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        tensor += 7
    dist.broadcast(tensor, 0, group=group)
    assert tensor.item() == 7.0
    return dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)


def test_a_subgroup_forms_anew_after_the_default_group(members):
    ranks = members(3, "gradwire_shm")
    everywhere(ranks, make_subgroup)
    kill([ranks.pop(1)], ranks)
    everywhere(ranks, form)
    assert everywhere(ranks, form_subgroup) == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def join_by_url(url: str, backend: str) -> tuple[int, int, float]:
    torch.set_num_threads(1)
    c10d.init_process_group(backend, url, enable_reconfigure=True)
    c10d.reconfigure(min_size=2, max_size=2)
    return dist.get_rank(), dist.get_world_size(), total()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_groups_without_ranks_start_by_url(workers, port, backend):
    ranks = everywhere(workers(2), join_by_url, f"tcp://127.0.0.1:{port}?rank=1", backend)
    assert sorted(ranks) == ranks_and_sums(2)


def destroy_without_ranks() -> list[str]:
    """Destroys a group that never got ranks, and one whose members did not come. Returns what threads are left."""
    c10d.init_process_group("shm", store=HashStore(), rank=0, enable_reconfigure=True)
    with pytest.raises(ProcessGroupError, match="the group has no ranks yet: call reconfigure"):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    c10d.init_process_group("shm", store=HashStore(), rank=0, enable_reconfigure=True)
    with pytest.raises(ProcessGroupError, match="which needs 2"):
        c10d.reconfigure(timeout=0.01)
    dist.destroy_process_group()
    return [each.name for each in threading.enumerate() if each.name.startswith("gradwire")]


def test_groups_without_ranks_can_be_destroyed(workers):
    assert workers(1)[0].run(destroy_without_ranks) == []
