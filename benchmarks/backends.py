"""What collectives are measured on: torch.distributed's functions on some backend, or an engine's own calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import gradwire.c10d
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["BACKENDS", "Backend", "Tensors"]


@dataclass(frozen=True, slots=True)
class Tensors:
    """What one rank works on: its own tensor, and one for each rank's."""

    rank: int
    mine: Tensor
    everybody: list[Tensor]


class Backend(Protocol):
    """Operations in the form of programs: they are over when they return."""

    def all_reduce(self, tensors: Tensors) -> None:
        """The sum of all, everywhere."""

    def broadcast(self, tensors: Tensors, root: int) -> None:
        """The root's tensor, everywhere."""

    def all_gather(self, tensors: Tensors) -> None:
        """Everybody's tensor, everywhere."""

    def send(self, tensors: Tensors, to: int) -> None:
        """One tensor to one rank."""

    def recv(self, tensors: Tensors, source: int) -> None:
        """One tensor from one rank."""

    def barrier(self) -> None:
        """Nothing but waiting."""


class Torch:
    """torch.distributed's functions, as everybody calls them."""

    def __init__(self, backend: str, rank: int, size: int, url: str) -> None:
        dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)

    def all_reduce(self, tensors: Tensors) -> None:
        dist.all_reduce(tensors.mine)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        dist.broadcast(tensors.mine, root)

    def all_gather(self, tensors: Tensors) -> None:
        dist.all_gather(tensors.everybody, tensors.mine)

    def send(self, tensors: Tensors, to: int) -> None:
        dist.send(tensors.mine, to)

    def recv(self, tensors: Tensors, source: int) -> None:
        dist.recv(tensors.mine, source)

    def barrier(self) -> None:
        dist.barrier()


class GlooItself:
    """The C++ class behind torch's backend, called directly."""

    def __init__(self, _: str, rank: int, size: int, url: str) -> None:
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
        self._gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

    def all_reduce(self, tensors: Tensors) -> None:
        self._gloo.allreduce([tensors.mine]).wait()

    def broadcast(self, tensors: Tensors, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensors.mine], options).wait()

    def all_gather(self, tensors: Tensors) -> None:
        self._gloo.allgather([tensors.everybody], [tensors.mine]).wait()

    def send(self, tensors: Tensors, to: int) -> None:
        self._gloo.send([tensors.mine], to, 0).wait()

    def recv(self, tensors: Tensors, source: int) -> None:
        self._gloo.recv([tensors.mine], source, 0).wait()

    def barrier(self) -> None:
        self._gloo.barrier().wait()


class MpiItself:
    """mpi4py, called directly, in a world that gradwire has formed."""

    def __init__(self, _: str, rank: int, size: int, url: str) -> None:
        gradwire.c10d.init_process_group("mpi", url, rank=rank, world_size=size)
        dist.barrier()  # forms the world
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD

    def all_reduce(self, tensors: Tensors) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, tensors.mine.numpy(), op=self._mpi.SUM)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        self._comm.Bcast(tensors.mine.numpy(), root)

    def all_gather(self, tensors: Tensors) -> None:
        whole = torch.empty(len(tensors.everybody), tensors.mine.numel())
        self._comm.Allgather(tensors.mine.numpy(), whole.numpy())
        for part, output in zip(whole, tensors.everybody, strict=True):
            output.copy_(part)

    def send(self, tensors: Tensors, to: int) -> None:
        self._comm.Send(tensors.mine.numpy(), to)

    def recv(self, tensors: Tensors, source: int) -> None:
        self._comm.Recv(tensors.mine.numpy(), source)

    def barrier(self) -> None:
        self._comm.Barrier()


BACKENDS: dict[str, Callable[[str, int, int, str], Backend]] = {
    "gradwire_shm": Torch,
    "gradwire_gloo": Torch,
    "gradwire_mpi": Torch,
    "gloo": Torch,
    "ProcessGroupGloo": GlooItself,
    "mpi4py": MpiItself,
}
"""By name; made with it, a rank, the number of ranks, and a URL where they meet."""
