"""Helpers for all_gathers that go through a process group of the workers."""

import time

import numpy as np
import torch
from gradwire import rpc
from gradwire.errors import ProcessGroupError
from gradwire.rpc.collectives import all_gather_group
from gradwire.rpc.contracts.agent import current_agent

MIB = 2**20
AT_ONCE = rpc.AllGatherOptions(after=1)
"""Groups form after the first round."""


def groups() -> int:
    return rpc.debug_info()["all_gather_groups"]


def went_through_group() -> bool:
    """Returns whether the last all_gather of all workers went through a process group."""
    finished = current_agent()._all_gather_service._leader._finished
    return finished["user", tuple(range(len(current_agent().workers())))][1].is_flat


def form(names: list[str] | None = None) -> None:
    """Runs all_gather until all workers have joined a group and know it. All of them call it at once."""
    size = len(names or rpc.debug_info()["transports"])
    deadline = time.monotonic() + 30
    while sum(bool(count) for count in rpc.all_gather(has_group(names), names).values()) < size:
        assert time.monotonic() < deadline, "no group has formed"


def has_group(names: list[str] | None) -> bool:
    """Returns whether this worker has joined a group of these workers."""
    ids = tuple(sorted(rpc.get_worker_info(name).id for name in names or rpc.debug_info()["transports"]))
    return current_agent()._all_gather_service._group_rounds.status(ids).is_formed


def grouped(workers, count: int, **options) -> list:
    """Starts workers that have a process group."""
    started = workers.rpc(count, all_gather=options.pop("all_gather", AT_ONCE), **options)
    workers.each(started, form)
    assert workers.each(started, groups) == [1] * count
    return started


def same(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        about = [(t.dtype, t.shape, t.layout, t.requires_grad, t.is_leaf) for t in (one, other)]
        dense = [t.detach().to_dense() if t.is_sparse else t.detach() for t in (one, other)]
        return about[0] == about[1] and torch.equal(*dense)
    return one == other


def fail_once(when: str) -> None:
    """Has the next round through a group fail on this worker, although the others may get the result."""
    exchange = all_gather_group._exchange

    def failing(*args: object) -> None:
        all_gather_group._exchange = exchange
        if when == "after":
            exchange(*args)
        raise ProcessGroupError("on purpose")

    all_gather_group._exchange = failing


def rounds(count: int, timeout: float = 30) -> list[dict[str, int]]:
    return [rpc.all_gather(number, timeout=timeout) for number in range(count)]
