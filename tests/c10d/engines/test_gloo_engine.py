"""The Gloo engine, with real processes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d import PrefixStore, TCPStore
from gradwire.c10d.engines import gloo as gloo_engine
from gradwire.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    ProcessGroupError,
    RankLostError,
    UnsupportedOperationError,
)

from tests.c10d.members import (
    collect_in_place,
    everywhere,
    future_of_a_sum,
    join_all,
    leave,
    opened,
    receive,
    reduce_until_it_fails,
    reduce_within,
    send,
    sum_in_group_of,
    total,
    wrong_cells,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

BACKEND = "gradwire_gloo"
"""The backend of the groups that the fixture `group` makes."""


@pytest.mark.timeout(300)
def test_every_operation_on_dtypes_of_each_kind(group):
    assert everywhere(group(2), wrong_cells, seconds=280) == [[], []]


def exchange_with_itself() -> float:
    """Messages of a rank to itself are refused, and the group stays usable."""
    rank, tensor = dist.get_rank(), torch.ones(1)
    with pytest.raises(UnsupportedOperationError, match="send to itself"):
        dist.isend(tensor, group_dst=rank)
    with pytest.raises(UnsupportedOperationError, match="receive from itself"):
        dist.irecv(tensor, group_src=rank)
    return total()


def test_messages_to_itself_are_refused(group):
    assert everywhere(group(2), exchange_with_itself) == [1.0, 1.0]


def allow_late_notices() -> None:
    """Has this worker wait long for the failure detector, which on a busy machine may take more than a second."""
    gloo_engine.FAILURE_REASON_TIMEOUT_S = 30.0


@pytest.mark.parametrize("dies", [0, 2])
def test_a_killed_rank_fails_the_others_in_the_middle(group, dies):
    started = group(3)
    everywhere(started, allow_late_notices)
    pending = [member.start(reduce_until_it_fails, dies) for member in started]
    for rank, each in enumerate(pending):
        if rank != dies:
            with pytest.raises(RankLostError, match=f"rank {dies} is lost") as caught:
                each.result()
            assert caught.value.rank == dies


@pytest.mark.parametrize("source", [1, None])
def test_a_death_wakes_ranks_that_wait_for_others(group, source):
    first, second, third = group(3)
    first.run(allow_late_notices)
    waiting = first.start(receive, source)
    assert everywhere([second, third], dist.get_rank) == [1, 2]
    third.kill()
    with pytest.raises(RankLostError, match="rank 2"):
        waiting.result()
    with pytest.raises(RankLostError, match="rank 2"):
        first.run(total)


def test_a_departed_rank_is_not_waited_for(group):
    first, second = group(2)
    waiting = first.start(total)
    second.run(leave)
    with pytest.raises(RankLostError, match="left the group"):
        waiting.result()


def test_other_ranks_can_exchange_messages_after_one_has_left(group):
    first, second, third = group(3)
    third.run(leave)
    waiting = first.start(receive, 1)
    second.run(send, 0)
    assert waiting.result() == (1, 1.0)
    with pytest.raises(RankLostError, match="rank 2"):
        first.run(total)


def test_a_timeout_fails_the_group_until_it_is_created_again(group, tmp_path):
    started = group(2)
    with pytest.raises(CollectiveTimeoutError, match="all_reduce timed out after 0.2 s"):
        started[0].run(reduce_within, 0.2)
    with pytest.raises(CollectiveTimeoutError):
        started[0].run(total)
    with pytest.raises(ProcessGroupError):
        started[1].run(total)
    everywhere(started, leave)
    join_all(started, tmp_path / "again", "gradwire_gloo")
    assert everywhere(started, total) == [1.0, 1.0]


def abort_while_waiting(source: int | None) -> None:
    work = dist.irecv(torch.zeros(1), source)
    assert not work.is_completed()
    dist.group.WORLD.abort()
    work.wait()


@pytest.mark.parametrize("source", [1, None])
def test_abort_wakes_waiting_threads(group, source):
    first, _ = group(2)
    with pytest.raises(GroupAbortedError):
        first.run(abort_while_waiting, source)


def test_subgroups(group):
    assert everywhere(group(3), sum_in_group_of, 0, 2) == [2.0, None, 2.0]


def test_inputs_and_outputs_may_share_memory(group):
    assert everywhere(group(2), collect_in_place) == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]]


def test_a_future_is_resolved_without_a_wait(group):
    assert everywhere(group(2), future_of_a_sum) == [6.0, 6.0]


def premultiplied() -> list[float]:
    tensor = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    return tensor.tolist()


def test_premultiplied_sums(group):
    assert everywhere(group(2), premultiplied) == [[1.5, 1.5]] * 2


def join_on(kind: str, rank: int, port: int) -> float:
    if kind == "torch":
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    else:
        store = TCPStore("127.0.0.1", port, is_master=rank == 0)
        opened.append(store)
    if kind == "prefix":
        store = PrefixStore("some/group", store)
    opened.append(store)
    dist.init_process_group("gradwire_gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    return total()


@pytest.mark.parametrize("kind", ["torch", "tcp", "prefix"])
def test_it_forms_on_any_store(workers, kind, free_port):
    pending = [member.start(join_on, kind, rank, free_port) for rank, member in enumerate(workers(2))]
    assert [each.result() for each in pending] == [1.0, 1.0]
