"""The cost of remote calls: of one that carries nothing, and of what it may carry."""

import os
import time
from collections.abc import Sequence
from typing import ClassVar

import torch
from gradwire import rpc

from .harness import Case, seconds_of
from .systems import System, system_here, worker_name
from .worker_sets import WARM_UP

__all__ = ["CASES", "KIB", "MIB", "PEER", "Echo", "Noop", "noop", "noop_times"]

PEER = worker_name(1)

KIB = 1 << 10
MIB = 1 << 20


def noop() -> None:
    """Does nothing."""


def noop_times(seconds: float) -> tuple[list[float], int]:
    """Calls `noop` on the peer for some seconds, by gradwire.

    Returns:
        The seconds of each call, and the number of further calls, at the beginning, that are not counted.
    """
    for _ in range(WARM_UP):
        rpc.rpc_sync(PEER, noop)
    times = []
    end = time.perf_counter() + seconds
    begun = 0.0
    while begun < end:
        begun = time.perf_counter()
        rpc.rpc_sync(PEER, noop)
        times.append(time.perf_counter() - begun)
    return times, WARM_UP


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Returns its argument."""
    return tensor


class Noop(Case):
    """A call that carries nothing."""

    name = "noop"

    def step(self) -> float:
        """Calls once."""
        return seconds_of(lambda: self._rpc.rpc_sync(PEER, noop))

    def results(self) -> list[torch.Tensor]:
        """Returns 1 if the call runs in another process, else 0."""
        return [torch.tensor(int(self._rpc.rpc_sync(PEER, os.getpid) != os.getpid()))]


class SmallArguments(Case):
    """A call whose arguments are two tensors of two elements."""

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._args = torch.ones(2), torch.ones(2)


class SmallTensors(SmallArguments):
    """Adds two tensors of two elements on the peer."""

    name = "add two tensors of 2 elements"

    def results(self) -> list[torch.Tensor]:
        """Returns the sum."""
        return [self._rpc.rpc_sync(PEER, torch.add, args=self._args)]


class Counter:
    """A value on the peer."""

    def __init__(self) -> None:
        self._count = 0

    def count(self) -> int:
        """Counts a call."""
        self._count += 1
        return self._count


class MethodCall(Case):
    """Calls a method of a value on the peer, by its RRef."""

    name = "RRef method call"

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._counter = system.rpc.remote(PEER, Counter)

    def step(self) -> float:
        """Calls once."""
        return seconds_of(lambda: self._counter.rpc_sync().count())

    def results(self) -> list[torch.Tensor]:
        """Returns the count."""
        return [torch.tensor(self._counter.rpc_sync().count())]


def call_many(to: Sequence[str], count: int) -> int:
    """Makes `count` calls to each of some workers, all at once; returns how many were answered."""
    rpc = system_here().rpc
    calls = [rpc.rpc_async(name, noop) for _ in range(count) for name in to]
    return len([call.wait() for call in calls])


class InFlight(Case):
    """64 calls at once; the time is that of one."""

    name = "noop, 64 in flight"
    calls = 64

    def results(self) -> list[torch.Tensor]:
        """Returns the number of answers."""
        return [torch.tensor(call_many([PEER], self.calls))]


class Echo(Case):
    """Sends a tensor to the peer, and gets it back."""

    nbytes: ClassVar[int]
    device: ClassVar[str] = "cpu"

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self._tensor = torch.arange(self.nbytes // 4, dtype=torch.float32, device=self.device)

    def send(self) -> torch.Tensor:
        """Sends it once."""
        echoed: torch.Tensor = self._rpc.rpc_sync(PEER, echo, args=(self._tensor,))
        return echoed

    def step(self) -> float:
        """Measures the way there and back."""
        return seconds_of(self.send)

    def results(self) -> list[torch.Tensor]:
        """Returns a part of what comes back."""
        return [self.send()[-1000:].cpu()]


class RemoteToHere(SmallArguments):
    """Makes a value on the peer, and fetches it."""

    name = "remote() and to_here()"

    def results(self) -> list[torch.Tensor]:
        """Returns the value."""
        return [self._rpc.remote(PEER, torch.add, args=self._args).to_here()]


class OneToMany(Case):
    """Worker 0 calls all others at once, 16 calls each; the time is that of one call."""

    name = "one to many: noop, 3 workers, 16 each"
    workers = 4
    calls = 48

    def results(self) -> list[torch.Tensor]:
        """Returns the number of answers."""
        return [torch.tensor(call_many([worker_name(rank) for rank in (1, 2, 3)], 16))]


class ManyToOne(Case):
    """Three workers call worker 0, 64 calls each at once; the time is that of one call."""

    name = "many to one: noop, 3 workers, 64 each"
    workers = 4
    calls = 192

    def results(self) -> list[torch.Tensor]:
        """Returns the number of answers; worker 0 asks the others to call it, which takes three more calls."""
        args = [worker_name(0)], 64
        callers = [self._rpc.rpc_async(worker_name(rank), call_many, args=args) for rank in (1, 2, 3)]
        return [torch.tensor(sum(caller.wait() for caller in callers))]


CASES: list[type[Case]] = [
    Noop,
    SmallTensors,
    MethodCall,
    InFlight,
    Echo.variant("echo 64 KiB", nbytes=64 * KIB),
    *(Echo.variant(f"echo {mib} MiB", nbytes=mib * MIB) for mib in (1, 16, 64, 256)),
    RemoteToHere,
    OneToMany,
    ManyToOne,
]
