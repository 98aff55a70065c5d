"""The cost of remote calls: of one that carries nothing, and of what it may carry."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .harness import Case, seconds_of
from .systems import System, worker_name

__all__ = ["CASES"]

PEER = worker_name(1)

KIB = 1 << 10
MIB = 1 << 20


def noop() -> None:
    """Does nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Returns its argument."""
    return tensor


class Noop(Case):
    """A call that carries nothing."""

    name = "noop"
    workers = 2

    def __init__(self, system: System) -> None:
        self._rpc = system.rpc

    def step(self) -> float:
        """Calls once."""
        return seconds_of(lambda: self._rpc.rpc_sync(PEER, noop))

    def results(self) -> list[torch.Tensor]:
        """Returns the ids of two different processes as whether they differ."""
        return [torch.tensor(self._rpc.rpc_sync(PEER, os.getpid) != os.getpid())]


class SmallArguments(Case):
    """A call whose arguments are two tensors of two elements; its time is that of its results."""

    workers = 2

    def __init__(self, system: System) -> None:
        self._rpc = system.rpc
        self._args = torch.ones(2), torch.ones(2)

    def step(self) -> float:
        """Calls once."""
        return seconds_of(self.results)


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
    workers = 2

    def __init__(self, system: System) -> None:
        self._counter = system.rpc.remote(PEER, Counter)

    def step(self) -> float:
        """Calls once."""
        return seconds_of(lambda: self._counter.rpc_sync().count())

    def results(self) -> list[torch.Tensor]:
        """Returns the count."""
        return [torch.tensor(self._counter.rpc_sync().count())]


class InFlight(Case):
    """64 calls at once; the time is that of one."""

    name = "noop, 64 in flight"
    workers = 2
    count: ClassVar[int] = 64

    def __init__(self, system: System) -> None:
        self._rpc = system.rpc

    def step(self) -> float:
        """Makes 64 calls and waits for all."""
        return seconds_of(self._call) / self.count

    def _call(self) -> list[Any]:
        futures = [self._rpc.rpc_async(PEER, noop) for _ in range(self.count)]
        return [future.wait() for future in futures]

    def results(self) -> list[torch.Tensor]:
        """Returns the number of answers."""
        return [torch.tensor(len(self._call()))]


class Echo(Case):
    """Sends a tensor to the peer, and gets it back."""

    workers = 2
    nbytes: ClassVar[int]

    def __init__(self, system: System) -> None:
        self._rpc = system.rpc
        self._tensor = torch.arange(self.nbytes // 4, dtype=torch.float32)

    def step(self) -> float:
        """Sends it once."""
        return seconds_of(lambda: self._rpc.rpc_sync(PEER, echo, args=(self._tensor,)))

    def results(self) -> list[torch.Tensor]:
        """Returns a part of what comes back."""
        return [self._rpc.rpc_sync(PEER, echo, args=(self._tensor,))[-1000:]]


def _echo(nbytes: int, name: str) -> type[Case]:
    """Makes the case of one size, at the top level of this module so that workers find it."""
    attributes = {"__module__": __name__, "name": f"echo {name}", "nbytes": nbytes}
    case = type(f"Echo{name.replace(' ', '')}", (Echo,), attributes)
    globals()[case.__name__] = case
    return case


class RemoteToHere(SmallArguments):
    """Makes a value on the peer, and fetches it."""

    name = "remote() and to_here()"

    def results(self) -> list[torch.Tensor]:
        """Returns the value."""
        return [self._rpc.remote(PEER, torch.add, args=self._args).to_here()]


class LargeBackward(Case):
    """Backward of a product on the peer; the gradients have 4 MiB."""

    name = "backward, gradients of 4 MiB"
    workers = 2

    def __init__(self, system: System) -> None:
        torch.manual_seed(0)
        self._rpc, self._autograd = system.rpc, system.autograd
        self._leaves = [torch.rand(MIB, requires_grad=True) for _ in range(2)]

    def step(self) -> float:
        """Runs forward, then measures backward."""
        with self._autograd.context() as context_id:
            loss = self._rpc.rpc_sync(PEER, torch.mul, args=tuple(self._leaves)).sum()
            return seconds_of(lambda: self._autograd.backward(context_id, [loss]))

    def results(self) -> list[torch.Tensor]:
        """Returns a part of the gradient of one factor."""
        with self._autograd.context() as context_id:
            loss = self._rpc.rpc_sync(PEER, torch.mul, args=tuple(self._leaves)).sum()
            self._autograd.backward(context_id, [loss])
            return [self._autograd.get_gradients(context_id)[self._leaves[0]][:1000]]


def call_many(rpc: Any, to: str, count: int) -> int:
    """Makes calls to a worker, all at once; returns how many were answered."""
    return len([future.wait() for future in [rpc.rpc_async(to, noop) for _ in range(count)]])


class Everybody(Case):
    """Worker 0 calls all others at once, 16 calls each; the time is that of one call."""

    name = "one to many: noop, 3 workers, 16 each"
    workers = 4
    count: ClassVar[int] = 16

    def __init__(self, system: System) -> None:
        self._rpc = system.rpc
        self._others: Sequence[str] = [worker_name(rank) for rank in range(1, self.workers)]

    def step(self) -> float:
        """Makes all calls and waits for them."""
        return seconds_of(self._call) / (self.count * len(self._others))

    def _call(self) -> list[Any]:
        calls = [self._rpc.rpc_async(to, noop) for _ in range(self.count) for to in self._others]
        return [call.wait() for call in calls]

    def results(self) -> list[torch.Tensor]:
        """Returns the number of answers."""
        return [torch.tensor(len(self._call()))]


CASES: list[type[Case]] = [
    Noop,
    SmallTensors,
    MethodCall,
    InFlight,
    *(
        _echo(nbytes, name)
        for nbytes, name in (
            (64 * KIB, "64 KiB"),
            (MIB, "1 MiB"),
            (16 * MIB, "16 MiB"),
            (64 * MIB, "64 MiB"),
            (256 * MIB, "256 MiB"),
        )
    ),
    RemoteToHere,
    LargeBackward,
    Everybody,
]
