"""However a rank ends its group, the others learn it, and which rank it was, on every engine."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from gradwire.c10d.engines import gloo as gloo_engine
from gradwire.errors import CollectiveTimeoutError, RankLostError

from tests.c10d.members import everywhere, total

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch 2.13 has newer names than 2.11

ENGINES = ["gradwire_shm", "gradwire_gloo", "gradwire_mpi", "fake_nccl"]

TOLD_SECONDS = 15.0
"""Seconds in which the others learn that a rank has ended its group, on a busy machine. Without being told, they
would find out after a minute or more."""


def be_patient() -> None:
    """Has Gloo wait long for the cause of a broken connection."""
    gloo_engine.FAILURE_REASON_TIMEOUT_S = 60.0


def sum_until_an_error() -> tuple[int, str, float]:
    """Returns which rank is lost, why, and when this rank has learnt it."""
    with pytest.raises(RankLostError) as caught:
        while True:
            total()
    return caught.value.rank, str(caught.value), time.monotonic()


def abort() -> float:
    dist.group.WORLD.abort()
    return time.monotonic()


def shut_down() -> float:
    dist.destroy_process_group()
    return time.monotonic()


def time_out() -> float:
    """Waits for a message that nobody sends, so that the group fails on this rank only."""
    dist.group.WORLD.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(CollectiveTimeoutError):
        dist.recv(torch.zeros(1), 2)
    return time.monotonic()


@pytest.mark.parametrize(
    ("end", "rank", "why"),
    [
        (abort, 1, "rank 1 aborted the group"),
        (abort, 0, "rank 0 aborted the group"),
        (shut_down, 1, "rank 1 shut the group down"),
        (time_out, 0, "timed out after 0.1 s"),
        (time_out, 1, "timed out after 0.1 s"),
    ],
)
@pytest.mark.parametrize("backend", ENGINES)
def test_the_others_learn_why_a_rank_has_ended_its_group(group_on, backend, end, rank, why):
    members = group_on(backend, 3)
    everywhere(members, be_patient)
    everywhere(members, total)
    waiting = [member.start(sum_until_an_error) for i, member in enumerate(members) if i != rank]
    ended = members[rank].run(end)
    for each in waiting:
        lost, text, learnt = each.result()
        assert lost == rank
        assert why in text
        assert learnt - ended < TOLD_SECONDS
