"""Ranks of the NCCL engine on fakes (fake_nccl.py), each on a thread of one process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gradwire.c10d import HashStore
from gradwire.c10d.engines import Setup
from gradwire.c10d.engines.nccl import NcclEngine
from gradwire.c10d.engines.reductions import Reduction
from gradwire.c10d.stores.views import PrefixStore
from gradwire.errors import GroupAbortedError

from tests.c10d.engines.fake_nccl import CpuGpus, StoreNccl

SUM = Reduction("sum")


class Rank:
    """One rank of a group, which runs on a thread of this process, with its fakes."""

    def __init__(self, store: HashStore, rank: int, size: int, *, insecure: bool = False, **options: Any) -> None:
        self.rank = rank
        self.size = size
        self.library = StoreNccl(PrefixStore("nccl", store))
        self.gpus = CpuGpus(f"process {rank}")
        self.failures: list[Exception] = []
        setup = Setup(
            store=PrefixStore("engine", store),
            rank=rank,
            size=size,
            timeout=30,
            device_type="cuda",
            global_ranks=tuple(range(size)),
            group_name="test",
            on_failure=self.failures.append,
            insecure=insecure,
        )
        self.engine = NcclEngine(setup, library=self.library, gpus=self.gpus, **options)

    def calls(self) -> list[Any]:
        """Returns the calls of NCCL since the last call of this method."""
        calls, self.library.calls = self.library.calls, []
        return calls


@contextmanager
def running_ranks() -> Iterator[Callable[..., list[Rank]]]:
    """Gives a function that creates ranks, and closes them; `ranks(2, interval=0.01)` passes engine options."""
    made: list[Rank] = []
    store = HashStore()

    def make(size: int, **options: Any) -> list[Rank]:
        made.extend(Rank(store, rank, size, **options) for rank in range(size))
        return made

    yield make
    for each in made:
        for stream in each.gpus.streams:
            stream.is_stalled = False
        each.engine.fail(GroupAbortedError("the test is over"))
        each.engine.close()
    store.close()


def everywhere(members: list[Rank], function: Callable[[Rank], Any]) -> list[Any]:
    """Calls a function for every rank concurrently; returns the results or raises the first error."""
    results: list[Any] = [None] * len(members)
    errors: list[BaseException] = []

    def run(member: Rank) -> None:
        try:
            results[member.rank] = function(member)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def all_reduce(member: Rank) -> torch.Tensor:
    tensor = torch.arange(4.0) + member.rank
    member.engine.all_reduce(tensor, SUM, 30).wait(None)
    return tensor


def stall_streams(member: Rank) -> None:
    """Keeps all work on the engine's streams from being done."""
    for stream in member.gpus.streams:
        stream.is_stalled = True


def start_stalled(member: Rank, timeout: float = 30.0) -> Any:
    """Starts an operation that stays in flight as long as its streams are stalled."""
    all_reduce(member)
    stall_streams(member)
    return member.engine.all_reduce(torch.ones(2), SUM, timeout)
