"""Workers that gather through a process group of theirs."""

import time

import numpy as np
import torch
from gradwire import rpc
from gradwire.errors import ProcessGroupError
from gradwire.rpc.collectives import all_gather_group as gather_group
from gradwire.rpc.contracts.agent import current_agent

MIB = 2**20
AT_ONCE = rpc.AllGatherOptions(after=1)
"""Groups form after the first gathering."""


def groups() -> int:
    return rpc.debug_info()["all_gather_groups"]


def went_through_group() -> bool:
    """Did the last gathering of all workers?"""
    finished = current_agent()._all_gather_service._finished
    return finished["user", tuple(range(len(current_agent().workers())))][1].flat


def form(names: list[str] | None = None) -> None:
    """Gathers until all have a group, and know that all have. All call it at once."""
    here = len(names or rpc.debug_info()["transports"])
    deadline = time.monotonic() + 30
    while sum(bool(count) for count in rpc.all_gather(groups_of(names), names).values()) < here:
        assert time.monotonic() < deadline, "no group has formed"


def groups_of(names: list[str] | None) -> bool:
    """Has the group of these workers come together?"""
    ids = tuple(sorted(rpc.get_worker_info(name).id for name in names or rpc.debug_info()["transports"]))
    return current_agent()._all_gather_service.paths.status(ids).formed


def grouped(workers, count: int, **options) -> list:
    """Workers that have a group."""
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
    """Has this worker not get the next result, although the others may."""
    exchange = gather_group._exchange

    def failing(*args: object) -> None:
        gather_group._exchange = exchange
        if when == "after":
            exchange(*args)
        raise ProcessGroupError("on purpose")

    gather_group._exchange = failing


def rounds(count: int, timeout: float = 30) -> list[dict[str, int]]:
    return [rpc.all_gather(number, timeout=timeout) for number in range(count)]
